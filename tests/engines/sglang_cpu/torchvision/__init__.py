"""A stand-in for torchvision, which SGLang imports for images."""

from torchvision import io as io, transforms as transforms

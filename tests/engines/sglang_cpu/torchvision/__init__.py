"""A stand-in for torchvision, which SGLang imports for images."""

from torchvision import io as io
from torchvision import transforms as transforms

"""What SGLang needs when it is imported on a CPU: stubs of packages, and leave to name models as Transformers does."""

import sys
import warnings
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "sglang_cpu"))  # the real packages come first where there are any
pytest.importorskip("sglang", reason="SGLang is tested by `make test-sglang`")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

register_config = CONFIG_MAPPING.register  # SGLang 0.5.12 and 0.5.17 register some that Transformers has too
CONFIG_MAPPING.register = lambda key, value, exist_ok=False: register_config(key, value, exist_ok=True)

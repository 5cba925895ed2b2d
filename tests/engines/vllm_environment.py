"""What vLLM reads when it is imported. The process that judges mutants imports vLLM once, as its tests do."""

import os
import sys
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
)
os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING")
sys.path.insert(0, str(Path(__file__).parent / "vllm_cpu"))

"""Generate text offline in vLLM, with Quire as its attention backend.

There is nothing of Quire to import: vLLM finds the plug-in by its entry point, and `attention_backend` chooses it.
Without that argument vLLM runs as if Quire were not installed.

    python examples/vllm_offline.py                              # the demo model, which is in a clone of Quire
    python examples/vllm_offline.py Qwen/Qwen2.5-0.5B-Instruct   # any other, by name or folder
"""

import sys
from pathlib import Path

from quire.version import packages_of

DEMO_MODEL = Path(__file__).parent.parent / "src" / "quire" / "demo_model"  # in a clone, however Quire is installed
PROMPTS = ("def main(", "The first line of the file", "import ")


def main() -> None:
    try:
        import vllm  # pyright: ignore[reportMissingImports]
        from packaging.version import Version
    except ImportError as error:
        raise SystemExit(f"this example needs vLLM (pip install {packages_of('vllm')}): {error}") from None
    if len(sys.argv) < 2 and not DEMO_MODEL.is_dir():
        raise SystemExit("this example needs a model outside of a clone of Quire; name one, or its folder")
    # From 0.32 on, a backend from outside has a name of its own. Before, they all share one name.
    backend = "QUIRE" if Version(vllm.__version__) >= Version("0.32") else "CUSTOM"
    model = sys.argv[1] if len(sys.argv) > 1 else str(DEMO_MODEL)
    llm = vllm.LLM(model, attention_backend=backend, max_model_len=256, gpu_memory_utilization=0.5)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=48)
    print(f"vLLM {vllm.__version__}, attention backend {backend}")
    for prompt, result in zip(PROMPTS, llm.generate(list(PROMPTS), sampling), strict=True):
        print(f"{prompt!r} continues as {result.outputs[0].text!r}")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()

"""The results page of SGLang says what the files of a run say."""

import importlib.util
import json
from pathlib import Path

spec = importlib.util.spec_from_file_location(
    "report_sglang", Path(__file__).parents[1] / "scripts" / "report_sglang.py"
)
assert spec is not None and spec.loader is not None
report = importlib.util.module_from_spec(spec)
spec.loader.exec_module(report)


def test_a_table_has_medians_of_rounds_and_the_ratio_to_the_fastest_other_backend(tmp_path):
    steps = {("quire", 1): (4.0, 5.0, 9.0), ("fa3", 1): (6.0, 6.0, 6.5), ("triton", 1): (7.0, 7.0, 7.0)}
    for (backend, size), values in steps.items():
        for number, step in enumerate(values):
            row = {"batch": 8, "prompt": 1024, "step_ms": step, "prefill_s": 0.25}
            run = {"backend": backend, "startup_s": 60 - number, "rows": [row]}
            (tmp_path / f"speed-{backend}-{size}-{number}.json").write_text(json.dumps(run))
    text = report.page(report.collect([tmp_path]))
    assert "| 8 × 1,024 | 5.00 | 6.00 | 7.00 | 1.20 |" in text
    assert "| 8 × 1,024 | 250 | 250 | 250 | 1.00 |" in text
    assert "| nothing compiled before | 60 | 60 | 60 | 1.00 |" in text


def test_tokens_alone_and_the_kit_are_counted(tmp_path):
    tokens = {"backend": "quire", "tokens": [[1], [2]], "alone": [[1], [3]]}
    (tmp_path / "tokens-quire-64-deterministic.json").write_text(json.dumps(tokens))
    (tmp_path / "judged_files.txt").write_text("tokens-quire-64-deterministic.json\n")
    (tmp_path / "judge.txt").write_text(
        "quire bfloat16 margin max 0.0150 mean 0.00012; tokens that are the float32 argmax 0.9875; equal to ...\n"
    )
    (tmp_path / "kit.xml").write_text(
        '<testsuites><testsuite tests="195" failures="1" errors="0" skipped="2"/></testsuites>'
    )
    text = report.page(report.collect([tmp_path]))
    assert "| quire, pages of 64 | yes | 1 of 2 | 0.015 | 0.00012 | 98.75% |" in text
    assert "192 of 195 tests" in text

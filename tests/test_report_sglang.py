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
    assert "| quire, pages of 64 | yes | 1 of 2 |  | 0.015 | 0.00012 | 98.75% |" in text
    assert "192 of 195 tests" in text
    assert "Not run" not in text


def test_tokens_are_compared_with_one_backend_s_and_what_was_not_run_is_said(tmp_path):
    for backend, tokens in (("quire", [[1, 2], [3, 4]]), ("fa3", [[1, 2], [3, 5]])):
        run = {"backend": backend, "tokens": tokens, "alone": tokens[:1]}
        (tmp_path / f"tokens-{backend}-1.json").write_text(json.dumps(run))
    text = report.page(report.collect([tmp_path]))
    assert "| quire, pages of 1 | no | 1 of 1 | 3 of 4 |  |  |  |" in text
    assert "| fa3 | no | 1 of 1 | 4 of 4 |  |  |  |" in text
    assert "Not run on a GPU: deterministic mode and SGLang's own kit for attention backends (0.5.23)." in text


def test_a_wrong_row_is_in_no_table_and_named_with_its_reason(tmp_path):
    rows = [{"batch": batch, "prompt": 1024, "step_ms": 3.5, "prefill_s": 0.25} for batch in (1, 8)]
    for size in (1, 64):
        run = {"backend": "quire", "startup_s": 60, "rows": rows}
        (tmp_path / f"speed-quire-{size}-0.json").write_text(json.dumps(run))
    wrong = {"backend": "quire", "page": 64, "batch": 8, "prompt": 1024, "why": "It compiled."}
    (tmp_path / "notes.json").write_text(json.dumps({"left_out": [wrong], "notes": ["A note."]}))
    text = report.page(report.collect([tmp_path]))
    assert "| 1 × 1,024 | 3.50 | 3.50 |  |" in text
    assert "| 8 × 1,024 | 3.50 |  |  |" in text
    assert "Left out: 8 × 1,024 of quire, pages of 64. It compiled." in text
    assert text.endswith("\n* A note.\n")


def test_the_page_says_what_its_data_say():
    data = report.RESULTS / f"{report.NAME}.json"
    page = data.with_suffix(".md").read_text(encoding="utf-8")
    assert report.page(json.loads(data.read_text(encoding="utf-8"))) == page, "run python scripts/report_sglang.py"

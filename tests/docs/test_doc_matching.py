"""The comparison of outputs: what it accepts, and what it does not."""

from __future__ import annotations

import pytest
from doc_blocks import blocks
from doc_matching import DEFAULT_TOLERANCE, difference, tolerance


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("a  b\n\n0.03 s.", "a b\n99.2 s.\n"),
        ("KL 0.0512 [0.0485, 0.0546]", "KL 0.0508 [0.0484, 0.0540]"),
        ("+0.77% [-0.46, 0.63]", "+0.75% [-0.44, 0.66]"),
        ("-0.11% [-0.34, 0.12]  0.0031", "-0.15% [-0.40, 0.03]  0.0030"),
        ("+0.02%, 95.8%", "-0.03%, 95.9%"),
        ("12 of 20, 86% [85, 88]", "12 of 20, 87% [85, 89]"),
        ("86% [85, 88]", "85.3% [84.9, 87.2]"),
        ("the first 8.8% [5.8, 13.2]", "the first 8.8% [5.4, 14.2]"),
        ("1.5e-05", "1.7e-05"),
        ("first\n...\nlast", "first\nx\ny\nlast"),
        ("...\nWritten", "x\nWritten"),
        ("first\n...", "first\nx\ny"),
        ("a long line ...", "a long line and its rest"),
        ('{"id":"cmpl-ab12","created":17}', '{"id":"cmpl-cd","created":18}'),
        ("-----  ---", "------- ---"),
    ],
)
def test_the_same(shown: str, printed: str) -> None:
    assert difference(shown, printed) is None


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("28 quantized", "27 quantized"),
        ("PASSED", "FAILED"),
        ("KL 0.0512", "KL 0.0712"),
        ("+0.77%", "-0.77%"),
        ("-0.11%  0.0031", "-0.15%  0.0041"),
        ("12 of 20, 86%", "12 of 21, 86%"),
        ("86% [85, 88]", "86% [85, 95]"),
        ("86% [85, 88]", "80.3% [79.9, 82.2]"),
        ("the first 8.8% [5.8, 13.2]", "the first 8.8% [2.4, 14.2]"),
        ("86% [85, 88]", "86%"),
        ("amax 324", "amax 322"),
        ("first\n...\nlast", "first\nlast\nx"),
        ("...\nmissing\n...", "x\ny"),
        ("a", "a\nb"),
        ("a\nb", "a"),
        ("", "a"),
        ("1.0 MiB", "1.0 GiB"),
        ("7,786 tokens", "7,787 tokens"),
    ],
)
def test_not_the_same(shown: str, printed: str) -> None:
    assert difference(shown, printed) is not None


def test_a_stated_tolerance() -> None:
    assert difference("about 31,000 of 10.0", "about 34,000 of 8.1", tolerance("within 20%")) is None
    assert difference("about 31,000", "about 42,000", tolerance("within 20%")) is not None
    assert difference("amax 324", "amax 322", tolerance("within 5%")) is None
    assert difference("fp8  28.69  34.9", "fp8  1.0  2", tolerance("vary")) is None
    assert difference("fp8  28.69", "bf16  28.69", tolerance("vary")) is not None
    assert tolerance("") == DEFAULT_TOLERANCE
    with pytest.raises(ValueError, match="not 'about right'"):
        tolerance("about right")


def test_comments_about_blocks_are_read(tmp_path) -> None:  # type: ignore[no-untyped-def]
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- test: full; numbers within 9%; status 1; first\nminifloat quantize MODEL OUT\n-->\n"
        "```console\n$ a\nb\n$ c\n```\n- item\n\n    <!-- test: not run, needs a GPU -->\n"
        "    ```bash\n    x \\\n      y  # why\n    ```\n\n```json\n{}\n```\n"
    )
    first, second, third = blocks(page)
    assert (first.full, first.tolerance, first.status, first.line) == (True, "within 9%", 1, 4)
    assert first.first.strip() == "minifloat quantize MODEL OUT"
    assert [(step.command, step.output) for step in first.steps] == [("a", "b\n"), ("c", "")]
    assert second.not_run == "needs a GPU"
    assert [step.command for step in second.steps] == ["x    y"]
    assert (third.language, third.text) == ("json", "{}\n")
    page.write_text("<!-- test: fulll -->\n```bash\nx\n```\n")
    with pytest.raises(ValueError, match=r"page.md:2: unknown word 'fulll'"):
        blocks(page)

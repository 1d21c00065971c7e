"""The line that progress shows."""

from paceline.decode.stats import Stats, progress_note


def test_a_note_tells_speed_mean_length_time_left_and_busy_shares() -> None:
    one = Stats(finished=30, finished_tokens=3000, tokens=3500, prefill_s=1.0, decode_s=8.0)
    other = Stats(finished=10, finished_tokens=1400, tokens=1500, decode_s=5.0)
    assert progress_note([one], 10.0) == "350 tokens/s, mean length 100"
    assert progress_note([one, other], 10.0, total=400) == (
        "500 tokens/s, mean length 110, eta 1:30, busy 90% 50% (mean 70%)"
    )


def test_a_note_before_anything_is_done() -> None:
    assert progress_note([], 0.0, total=5) == "0 tokens/s"
    assert progress_note([Stats()], 2.0, total=5) == "0 tokens/s"

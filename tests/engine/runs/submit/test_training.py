"""What a submit of a training run warns of."""

import pytest

from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest

pytestmark = pytest.mark.timeout(60)


def test_a_run_that_cuts_the_reference_answers_is_told_the_number_that_would_do(busy, bench, env):
    def warnings_with(max_tokens: int) -> list[str]:
        request = TrainRequest(
            env_id=env, algorithm="grpo", settings={"steps": 2, "max_tokens": max_tokens}
        )
        return [word for word in lifecycle.submit(bench.home, request)["warnings"] if "fit" in word]

    (warning,) = warnings_with(1)
    assert "100% of the reference answers do not fit into max_tokens = 1" in warning
    enough = int(warning.split("max_tokens = ")[-1].split(" ")[0])
    assert warnings_with(enough) == []

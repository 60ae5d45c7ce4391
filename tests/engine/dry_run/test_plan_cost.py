"""The estimate of a plan: each of its runs, all together, and their one cap."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.core.errors import UserError
from engine.cost.estimate import estimate_cost
from engine.dry_run.plan_cost import estimate_request
from engine.home.run_dir import Home
from engine.runs.submit.requests import TrainRequest

pytestmark = pytest.mark.timeout(60)

SFT = {"steps": 3, "learning_rate": 1e-3, "lora_rank": 4}
GRPO = {"algorithm": "grpo", "settings": {"steps": 2}}
EVALUATION = {"algorithm": "evaluate", "rows": 40}


def estimate(home: Home, **arguments: Any) -> dict[str, Any]:
    defaults = {"env_id": "sums", "algorithm": "sft", "settings": SFT, "then": [GRPO, EVALUATION]}
    return estimate_request(home, TrainRequest(**(defaults | arguments)))


def test_the_parts_of_a_plan_add_up_and_the_first_is_that_of_a_run_of_its_own(
    home: Home, add: Callable[..., str]
):
    home.config_file.write_text("gpu_hour_price = 2\n")
    add()
    reply = estimate(home)
    alone = estimate_cost(home, "sums", algorithm="sft", settings=SFT)
    assert reply["steps"][0]["hours"] == alone["gpu_hours"]
    assert reply["steps"][0]["memory"] == alone["peak_memory"]["total"]
    for level in ("low", "likely", "high"):
        hours = sum(step["hours"][level] for step in reply["steps"])
        assert reply["gpu_hours"][level] == pytest.approx(hours, abs=3e-4)
        assert reply["money"][level] == pytest.approx(2 * reply["gpu_hours"][level], abs=1e-3)
    assert reply["fits"] and reply["basis"] == "measured" and "3 runs" in reply["summary"]
    assert reply["next"][-1]["arguments"]["then"] == [GRPO, EVALUATION]


def test_every_combination_counts(home: Home, add: Callable[..., str]):
    add()
    once = estimate(home, then=[])["gpu_hours"]["likely"]
    four = estimate(home, then=[], vary={"seed": [1, 2], "loss_on": ["last", "all"]})
    assert len(four["steps"]) == 4
    assert four["gpu_hours"]["likely"] == pytest.approx(4 * once, rel=0.05)


def test_a_cap_that_is_too_low_for_all_is_said(home: Home, add: Callable[..., str]):
    add()
    hours = estimate(home)["gpu_hours"]
    assert estimate(home)["warnings"] == []
    (warning,) = estimate(home, max_gpu_hours=hours["likely"] / 2)["warnings"]
    assert "one cap for all runs" in warning and "will be refused" in warning
    between = (hours["likely"] + hours["high"]) / 2
    (warning,) = estimate(home, max_gpu_hours=between)["warnings"]
    assert "may be stopped" in warning


def test_what_a_submit_would_refuse_is_refused_with_its_step(home: Home, add: Callable[..., str]):
    add()
    with pytest.raises(UserError) as caught:
        estimate(home, then=[{"algorithm": "grpo", "settings": {"group_size": 1}}])
    assert caught.value.code == "SETTING_INVALID" and caught.value.message.startswith("step 2: ")
    assert caught.value.field == "then[0].settings.group_size"

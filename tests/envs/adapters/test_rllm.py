"""Evaluators of rLLM score answers, whatever of its shapes they are written in."""

import json

import pytest

ROWS = "".join(
    json.dumps({"question": f"Twice {number}?", "ground_truth": str(2 * number)}) + "\n"
    for number in range(12)
)
DECORATED = """
    import rllm
    from rllm.eval.types import EvalOutput, Signal
    from rllm.types import Episode

    @rllm.evaluator
    def score(task: dict, episode: Episode) -> EvalOutput:
        answer = str(episode.artifacts.get("answer", ""))
        is_correct = answer.strip() == task["ground_truth"].strip()
        signals = [Signal(name="accuracy", value=float(is_correct))]
        return EvalOutput(reward=float(is_correct), is_correct=is_correct, signals=signals)
    """
CLASS = """
    from rllm.eval.types import EvalOutput

    class Mine:
        def evaluate(self, task, episode):
            last = episode.trajectories[-1].steps[-1].model_response
            return EvalOutput(float(last == task.metadata["ground_truth"]), False)
    """
LIGHT = """
    def evaluate(metadata, trajectory):
        return {"reward": float(trajectory["output"] == metadata["ground_truth"]),
                "signals": {"length": len(trajectory["output"])}}
    """
# Code, what the options name, then (success, metrics) of a right answer.
EVALUATORS = {
    "a decorated function": (DECORATED, "e.py:score", (True, {"accuracy": 1.0})),
    "a class": (CLASS, "e.py:Mine", (False, {})),
    "a function of plain dicts": (LIGHT, "e.py", (True, {"length": 1.0})),
}


@pytest.mark.parametrize("name", EVALUATORS)
def test_an_evaluator_scores_the_answer_of_an_episode(name: str, write_folder, start):
    code, reference, (success, metrics) = EVALUATORS[name]
    toml = f'[adapter]\nkind = "rllm"\nevaluator = "{reference}"\nanswer = "ground_truth"\n'
    process = start(write_folder(toml, {"e.py": code, "data.jsonl": ROWS}))
    rows = process.tasks()
    assert rows[3]["prompt"][0]["content"] == "Twice 3?"
    assert rows[3]["answer"][0]["content"] == "6"
    right, wrong = process.score(rows[3], "6"), process.score(rows[3], "5")
    assert (right["reward"], right["success"], right["metrics"]) == (1.0, success, metrics)
    assert (wrong["reward"], wrong["success"]) == (0.0, False)


def test_an_evaluator_that_returns_nothing_costs_its_sample(write_folder, start):
    toml = '[adapter]\nkind = "rllm"\nevaluator = "e.py"\n'
    code = "def evaluate(task, episode):\n    pass\n"
    process = start(write_folder(toml, {"e.py": code, "data.jsonl": ROWS}))
    assert "returned NoneType" in process.score(process.tasks()[0], "1")["error"]

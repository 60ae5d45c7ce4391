"""audit.json: what the audit says, and what older releases wrote."""

from pathlib import Path

from engine.records.audit import Audit
from envs.audit.reward_audit import audit

GOLDEN = Path(__file__).parents[2] / "faults/golden/0.1.0/envs/sums/0123456789ab"


class Forgetful:
    """Pays the second answer more than the first, whatever it is."""

    calls = 0

    def score(self, task: object, completion: str) -> dict:
        self.calls += 1
        return {"reward": float(self.calls % 3), "success": None, "error": None, "seconds": 0.1}

    def start(self, task: object) -> None:
        raise AssertionError


def rows(count: int) -> list[dict]:
    message = {"role": "assistant", "content": "4"}
    return [
        {
            "id": str(number),
            "prompt": [{"role": "user", "content": f"{number}?"}],
            "answer": [message],
            "metadata": {},
        }
        for number in range(count)
    ]


def test_an_audit_of_an_older_release_is_read():
    stored = Audit.read(GOLDEN / "audit.json")
    assert stored.verdict == "ok" and stored.deterministic and stored.secrets_unset is None
    assert stored.as_written() == {"verdict": "ok", "headline": "ok"}


def test_every_key_of_an_audit_is_read_and_shown_as_it_was_written():
    for made in (
        audit(Forgetful(), rows(6), "single", fresh=Forgetful) | {"secrets_unset": ["KEY"]},
        audit(Forgetful(), [], "sft"),
    ):
        assert Audit.model_validate(made).as_written() == made

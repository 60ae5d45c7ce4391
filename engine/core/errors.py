"""Errors a caller can act on: what happened, the value, the next move.

Everything on the control side that refuses a request raises `UserError`; the server turns it into
an MCP error result, the command line prints it and leaves with exit status 2. `CODES` is the one
list of codes, held complete by a test and quoted by the playbook.
"""

from engine.core.hints import Call, Hint, hint_of

CODES: dict[str, str] = {
    "UNKNOWN_ARGUMENT": "A tool was called with an argument it does not have.",
    "BAD_ARGUMENT": "An argument has the wrong type or lies outside its range.",
    "BAD_CURSOR": "A cursor was not made by an earlier call of the same tool.",
    "SETTING_UNKNOWN": "A training setting does not exist.",
    "SETTING_INVALID": "A training setting has a value that cannot work.",
    "SETTING_NOT_APPLICABLE": "A training setting does not apply to the chosen algorithm.",
    "PATH_OUTSIDE_ROOTS": "A path lies outside the folders this server may read.",
    "ENV_NOT_FOUND": "No pushed environment matches.",
    "ENV_AMBIGUOUS": "More than one pushed environment matches.",
    "ENV_INVALID": "The environment breaks its contract.",
    "ENV_IMPORT": "The environment could not be imported or did not answer in time.",
    "ENV_PARAM": "The environment got a parameter it does not accept.",
    "ENV_DEPS": "The environment needs packages that are not installed.",
    "ENV_SECRETS": "A secret the environment names is not set for this server.",
    "ENV_SANDBOX": "User code cannot be confined here as config.toml asks.",
    "ENV_SEALED": "The environment is a sealed exam, which shows a verdict and nothing else.",
    "ENV_LIMITS": "The environment is larger than a push may be.",
    "ENV_BUSY": "Another process works on this version of an environment.",
    "DATASET_INVALID": "Rows of a data file cannot be read.",
    "DATASET_READING": "A large data file is still being read.",
    "MODEL_NOT_FOUND": "No model matches the reference.",
    "MODEL_UNSUPPORTED": "The model cannot be trained here.",
    "ADAPTER_MISMATCH": "An adapter does not belong to this base model.",
    "REWARD_RISK": "The reward audit found that degenerate answers are paid.",
    "BUDGET": "The estimate is above the limit given.",
    "DOES_NOT_FIT": "The run would not fit into the memory of this machine.",
    "NO_TORCH": "No interpreter with torch is available to train with.",
    "NO_VLLM": "vLLM has no environment that works.",
    "RUN_NOT_FOUND": "No run matches.",
    "RUN_STATE": "The run is in a state that does not allow this.",
    "REQUEST_CONFLICT": "The same request_id was used with other arguments.",
    "NOT_COMPARABLE": "The results cannot be compared.",
    "NO_EVALUATION": "There is no evaluation to read.",
    "DEVICE_BUSY": "The device is in use.",
    "DEVICE_UNUSABLE": "Nothing can be computed on the device.",
    "DEPLOY_FAILED": "The deployment did not become ready.",
    "DEPLOYMENT_NOT_FOUND": "No deployment matches.",
    "SECTION_NOT_FOUND": "The playbook has no such section.",
    "NOT_APPROVED": "The spend was not approved.",
    "READ_ONLY": "This server was started read-only.",
    "FORBIDDEN": "The key of this call lacks the scope, or the owner's word, that it needs.",
    "QUOTA": "The key of this call has used what it may use.",
    "HOST_NOT_FOUND": "No machine over SSH has this name.",
    "HOST_UNUSABLE": "A machine over SSH cannot be reached or used.",
    "HOME_UNUSABLE": "The home folder cannot be used.",
    "DISK_FULL": "There is not enough disk space.",
    "INTERNAL": "A fault of ours; details are in the server's log.",
}

# A failed run carries one of these kinds; see engine/worker/core/failures.py for the evidence line.
FAILURE_KINDS: dict[str, str] = {
    "config": "the resolved settings cannot be trained with",
    "data": "the rows cannot be trained on",
    "env_import": "the environment could not be started",
    "reward": "too many rewards raised, hung or crashed",
    "oom": "memory ran out",
    "nonfinite": "a loss, gradient or weight became NaN or infinite",
    "no_signal": "no group had any variance in its rewards for many steps",
    "no_update": "the adapter did not change",
    "infra": "the disk, the interpreter or the machine failed",
    "endpoint": "a model that the run asks over HTTP did not answer",
    "timeout": "the run outlived its wall-clock limit",
    "stalled": "the worker gave no sign of life for far longer than usual",
    "budget": "the GPU-hours of the run, or what its judges may take, are spent",
    "lease": "the machine that started the run gave no word for too long",
    "killed": "the trainer was killed from outside",
    "interrupted": "the run was interrupted too many times",
    "cancelled": "the run was cancelled",
    "target_reached": "a step before it in its plan had reached the target: it was skipped",
    "awaited": "a run whose model it waited for did not end well",
    "internal": "a fault of ours",
}


class UserError(Exception):
    """A refusal the caller can act on: what happened, and what to do next."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        hint: str | Hint = "",
        field: str = "",
        retryable: bool = False,
        playbook: str = "",
    ) -> None:
        """Make the error.

        Args:
            code: one of `CODES`.
            message: what happened, with the offending value.
            hint: the next move: an edit in words, or a `Hint` with the call to make.
            field: the argument or setting at fault, dotted.
            retryable: whether the same call may succeed later.
            playbook: a section of the playbook (the guide for agents) that helps.

        Raises ValueError if `code` is not in `CODES`.
        """
        if code not in CODES:
            raise ValueError(f"unknown error code {code!r}; add it to engine.core.errors.CODES")
        super().__init__(message)  # str(error) is the message alone
        self.code = code
        self.message = message
        self.advice = hint_of(hint)
        self.field = field
        self.retryable = retryable
        self.playbook = playbook

    @property
    def hint(self) -> str:
        """The next move as one text for an agent: the sentence, then the call to make."""
        return str(self.advice)

    def of_call(self, refused: Call) -> "UserError":
        """Complete this error's hint, in place, with the call `refused`; return the error itself.

        A hint that only says what to change in a call becomes the whole changed call. Any other
        hint stays as it is.
        """
        self.advice = self.advice.for_call(refused)
        return self

    def payload(self) -> dict[str, object]:
        """Return the error as a JSON object, which is the same for every front end.

        Its keys are `code`, `message`, `field`, `hint`, `call`, `retryable` and `playbook`. The
        keys `field`, `call` and `playbook` are left out if the error has no such value.
        """
        fields: dict[str, object] = {"code": self.code, "message": self.message}
        if self.field:
            fields["field"] = self.field
        fields |= self.advice.as_fields()  # `hint`, and `call` if the hint has a call
        fields["retryable"] = self.retryable
        if self.playbook:
            fields["playbook"] = self.playbook
        return fields

"""Seconds a push may take, in all and of each part. A tool call may not last longer."""

PUSH_SECONDS = 45.0
AFTER_START = 15.0  # of them kept for the audit and what comes after it
START_SECONDS = 15.0  # left for an import at least, however long the packages took
TASKS_SECONDS = 10.0  # left for tasks() at least, however long the import took
INSTALL_SECONDS = 40.0
AUDIT_SECONDS = 5.0
CALL_SECONDS = 10.0  # for one answer of the environment

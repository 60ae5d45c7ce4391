"""Seconds that a push and each of its parts may take; a tool call may not last longer."""

PUSH_SECONDS = 45.0
AFTER_START = 15.0  # part of PUSH_SECONDS reserved for the audit and what follows it
START_SECONDS = 15.0  # least time for the import, however long the packages took
TASKS_SECONDS = 10.0  # least time for tasks(), however long the import took
INSTALL_SECONDS = 40.0
AUDIT_SECONDS = 5.0
CALL_SECONDS = 10.0  # time for one reply of the environment

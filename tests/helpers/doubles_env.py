"""The source of an environment that asks for twice a number; a push takes milliseconds."""

DOUBLES = """
    from envs import Score, SingleTurnEnv, Task

    class Doubles(SingleTurnEnv):
        def __init__(self, rows):
            self.rows = rows

        def tasks(self):
            return [Task(f"d{n}", f"Twice {n}?", str(2 * n)) for n in range(self.rows)]

        def score(self, task, completion):
            right = completion.strip() == task.answer
            return Score(float(right), success=right, metrics={"length": len(completion)})

    def load_environment(rows=60):
        return Doubles(rows)
"""

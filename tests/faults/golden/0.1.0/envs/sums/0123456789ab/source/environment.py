from envs import Score, SingleTurnEnv, Task


class Sums(SingleTurnEnv):
    def tasks(self):
        return [Task("a", "1 + 1?", answer="2")]

    def score(self, task, completion):
        return Score(reward=sum(c.isdigit() for c in completion) / 8, success="1" in completion)


def load_environment():
    return Sums()

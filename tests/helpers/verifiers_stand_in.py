"""The names and shapes of verifiers 0.4 that its adapter touches, in plain Python: the package
itself takes nine seconds to import."""

PACKAGE = {
    "verifiers/__init__.py": '__version__ = "0.4.0"\n',
    "verifiers/v1/__init__.py": '''
        from types import SimpleNamespace as Plain


        class Model:
            """A pydantic model as far as it is used: fields with defaults, no others."""

            def __init__(self, **values):
                fields = {}
                for base in reversed(type(self).__mro__):
                    fields |= {k: None for k in vars(base).get("__annotations__", {})}
                    fields |= {k: v for k, v in vars(base).items() if k in fields}
                for name in values:
                    if name not in fields:
                        raise ValueError(f"{name}: Extra inputs are not permitted")
                vars(self).update({**fields, **values})

            model_validate = classmethod(lambda cls, values: cls(**values))

            def __iter__(self):
                return iter(vars(self).items())

            def model_dump(self, mode="python"):
                return {k: v for k, v in self if isinstance(v, str | int | list | None)}

            def model_copy(self, update):
                return type(self)(**{**vars(self), **update})


        class AgentConfig(Model):
            harness: object = None
            runtime: object = None
            max_turns: int = None


        class SubprocessConfig(Model):
            pass


        class TaskConfig(Model):
            stops: dict = {}


        class TasksetConfig(Model):
            id: str = ""
            task: object = TaskConfig()


        class EnvConfig(Model):
            taskset: object = None
            env_id = ""


        class TaskData(Model):
            idx: int = None
            id: str = None
            name: str = None
            prompt: str = None
            system_prompt: str = None
            image: str = None
            agent_user: str = None
            artifacts: list = []
            skills: list = []
            network_allow: list = ["*"]
            network_block: list = []


        class State(Model):
            pass


        class Task:
            NEEDS_CONTAINER = False
            data_class, key, hash = TaskData, "", ""

            def __init__(self, data, config=None):
                self.data, self.config = data, config

            toolsets = classmethod(lambda cls, config: [])
            data_type = classmethod(lambda cls: cls.data_class)

            def runtime_env(self):
                return {}

            async def setup(self, trace, runtime):
                trace.info["order"] = ["setup"]

            async def finalize(self, trace, runtime):
                trace.info["order"].append("finalize")

            async def score(self, trace, runtime):
                trace.info["order"].append("score")
                for name in dir(type(self)):
                    hook = getattr(self, name)
                    if hasattr(hook, "weight"):
                        trace.record_reward(name, await hook(trace), hook.weight)
                trace.metrics["turns"] = trace.num_turns
                trace.metrics["hooks"] = len(trace.info["order"])


        def reward(weight=1.0):
            def mark(function):
                function.weight = weight
                return function
            return mark


        def stop(function):
            function.stop = True
            return function


        class Taskset:
            task_class, config_class, bounded = Task, TasksetConfig, True

            def __init__(self, config):
                self.config = config

            toolsets = classmethod(lambda cls, config: [])
            task_type = classmethod(lambda cls: cls.task_class)

            def __iter__(self):
                for idx, task in enumerate(self.load()):
                    task.data = task.data.model_copy({"idx": idx})
                    yield task

            def take(self, size):
                return [task for _, task in zip(range(size), self)]


        class Env:
            config_class = EnvConfig

            def __init__(self, config):
                self.config = config

            async def start(self): pass
            async def setup(self, agents): pass
            async def run(self, task, agents): pass
            async def finalize(self, task, episode): pass


        class Trace:
            def __init__(self, task, state, agent):
                self.task, self.state, self.agent, self.id = task, state, agent, "trace"
                self.nodes, self.calls, self.info = [], [], {}
                self.rewards, self.metrics = {}, {}

            def stop(self, condition):
                self.stop_condition = condition

            def record_reward(self, name, score, weight=1.0):
                self.rewards[name] = Plain(score=score, weight=weight)

            @property
            def reward(self):
                return sum(each.score * each.weight for each in self.rewards.values())

            @property
            def messages(self):
                return [node for node in self.nodes]

            @property
            def last_reply(self):
                return self.nodes[-1].content.strip()

            @property
            def num_turns(self):
                return sum(node.role == "assistant" for node in self.nodes)


        def _message(role):
            return lambda content, **more: Plain(role=role, content=content, **more)


        SystemMessage, UserMessage = _message("system"), _message("user")
        AssistantMessage, ToolMessage = _message("assistant"), _message("tool")
        TraceTask = AgentInfo = Response = ModelCall = Episode = EnvInfo = Plain


        class Segment:
            def __init__(self, messages, terminated=False):
                self.messages, self.terminated = messages, terminated
                self.last_reply = messages[-1].content.strip() if messages else ""
        ''',
    "verifiers/v1/state.py": """
        from verifiers.v1 import State

        def state_cls(kind):
            return State
        """,
    "verifiers/v1/runtimes.py": """
        from types import SimpleNamespace

        def make_runtime(config, name):
            async def nothing():
                pass
            return SimpleNamespace(info=name, start=nothing, stop=nothing)
        """,
    "verifiers/v1/graph.py": """
        from types import SimpleNamespace

        def prepare_turn(trace, prompt):
            def commit(response):
                trace.nodes = [*prompt, response.message]
                return len(prompt)
            return SimpleNamespace(commit=commit)
        """,
    "verifiers/v1/dialects.py": "",
    "verifiers/v1/configs/agent.py": """
        from verifiers.v1 import AgentConfig

        def agent_config_fields(config):
            return {name: value for name, value in config if isinstance(value, AgentConfig)}
        """,
    "verifiers/v1/envs/single_agent.py": """
        import verifiers.v1 as vf

        class SingleAgentEnv(vf.Env):
            async def run(self, task, agents):
                await agents.agent.run(task)
        """,
    "verifiers/v1/utils/decorators.py": """
        import inspect

        def discover_decorated(task, kind):
            found = [getattr(type(task), name, None) for name in dir(type(task))]
            return [each for each in found if hasattr(each, kind)]

        def invoke(hook, available):
            names = inspect.signature(hook).parameters
            return hook(**{name: available[name] for name in names})
        """,
    "verifiers/v1/utils/loaders.py": """
        import importlib
        import verifiers.v1 as vf
        from verifiers.v1.envs.single_agent import SingleAgentEnv

        def _exported(name, base):
            module = import_taskset(name)
            found = [getattr(module, each) for each in module.__all__]
            return [each for each in found if issubclass(each, base)]

        def import_taskset(name):
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                raise ModuleNotFoundError(f"taskset {name!r} not found") from error

        def taskset_class(name):
            return _exported(name, vf.Taskset)[0]

        def taskset_config_type(name):
            return taskset_class(name).config_class

        def default_harness_id(name):
            return "bash"

        def environment_class(name):
            return (*_exported(name, vf.Env), SingleAgentEnv)[0]

        def env_config_type(name):
            return environment_class(name).config_class

        def resolve_env_config(fields):
            config = environment_class(fields["taskset"]["id"]).config_class()
            return config.model_copy({"taskset": fields["taskset"]})
        """,
}

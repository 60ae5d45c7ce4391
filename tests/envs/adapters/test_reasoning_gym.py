"""Families of reasoning-gym by name: the package's questions, the package's grades."""

STAND_IN = {
    # Importing the package as a whole fails: a family must be loaded alone.
    "reasoning_gym/__init__.py": "raise RuntimeError('all hundred families were loaded')",
    "reasoning_gym/factory.py": """
        DATASETS = {}

        def create_dataset(name, size, seed, top=9):
            return [DATASETS[name](seed + number, top) for number in range(size)]

        def get_score_answer_fn(name):
            return grade

        def grade(answer, entry):
            if answer == entry["answer"]:
                return 1.0
            return 0.5 if entry["answer"] in answer else 0.0
        """,
    "reasoning_gym/sums/twice.py": """
        from reasoning_gym.factory import DATASETS

        def entry(number, top):
            value = number % top
            return {"question": f"Twice {value}?", "answer": str(2 * value), "metadata": {}}

        DATASETS["twice"] = entry
        """,
}
TOML = """
    [adapter]
    kind = "reasoning-gym"
    family = "twice"
    size = 12
    seed = 3
    suffix = "A number."

    [adapter.settings]
    top = 100
    """


def test_a_family_makes_the_tasks_and_its_own_code_grades_them(packages, write_folder, start):
    process = start(write_folder(TOML), python=packages(STAND_IN))
    rows = process.tasks()
    assert process.describe()["kind"] == "single" and len(rows) == 12
    assert rows[0]["prompt"][0]["content"] == "Twice 3? A number."
    right, partial = process.score(rows[0], " 6\n"), process.score(rows[0], "6 or 7")
    assert (right["reward"], right["success"]) == (1.0, True)
    assert (partial["reward"], partial["success"]) == (0.5, False)


def test_without_its_package_the_fault_says_what_to_install(packages, write_folder, start):
    process = start(write_folder(TOML), python=packages({"other.py": ""}))
    said = process.score({"id": "a", "prompt": [], "answer": None}, "6")["error"]
    assert "'reasoning_gym' is not installed" in said

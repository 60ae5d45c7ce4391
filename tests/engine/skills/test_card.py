"""The card says what is asked, how it is judged, and what a comparison can show."""

from engine.skills.batteries import battery_of, practice_of
from engine.skills.card import fewest_significant, skills_card


def test_the_card_names_every_skill_of_both_batteries_with_an_example_and_its_power() -> None:
    card = skills_card()
    for base in ("pebble", "any other"):
        battery = battery_of(base)
        for task in battery.tasks:
            assert f"| {task['family']} |" in card
        assert f"{len(battery.tasks)} questions, {len(practice_of(base).tasks)} for" in card
    assert "6 answers lost and none gained (4.5 points) are significant" in card  # 6 of 132
    assert "it makes the call `{" in card
    assert "Apache-2.0" in card and "None" not in card


def test_losses_without_gains_are_significant_from_six_on() -> None:
    assert fewest_significant() == 6  # 2 / 64 = 0.031, and 2 / 32 = 0.062 for five
    assert fewest_significant(0.01) == 8

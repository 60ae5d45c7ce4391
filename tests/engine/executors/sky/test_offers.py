"""What a machine costs, and what is too dear."""

from typing import Any

import pytest

from engine.executors.sky.offers import allowed_offer, find_offers, machine_of
from engine.executors.ssh import FarError
from engine.home.config_tables.hosts import SKY, Host, SkyOptions


class Catalogue:
    """A server that lists these rows."""

    def __init__(self, *rows: list[Any]) -> None:
        self.rows, self.asked = rows, []

    def offers(self, accelerator: str, clouds: list[str]) -> list[list[Any]]:
        self.asked.append((accelerator, clouds))
        return list(self.rows)


def row(cloud: str, count: float, price: Any, region: str = "US", spot: Any = 1.0) -> list[Any]:
    return [cloud, f"{cloud}-x", "H100", count, 16, 80.0, 188.0, price, spot, region]


def host(**options: Any) -> Host:
    values: Any = {"accelerators": "H100:1", "address": "https://sky.example"} | options
    return Host("rented", "", SKY, sky=SkyOptions(**values))


def test_the_cheapest_of_what_fits_is_taken():
    rows = [row("AWS", 1, 6.9), row("RunPod", 1, 2.5), row("RunPod", 2, 1.0), row("GCP", 1, None)]
    catalogue = Catalogue(*rows, row("GCP", 1, float("nan")), row("GCP", 1, True))
    rented = host()
    offers = find_offers(catalogue, rented.sky)  # pyright: ignore[reportArgumentType]
    assert [each.price for each in offers] == [2.5, 6.9]
    best = allowed_offer(rented, offers)
    assert best is not None and best.in_words == "RunPod-x at RunPod US for 2.50 an hour"
    machine = machine_of(best, rented.sky)
    assert [(d.name, d.kind, d.memory_total >> 30) for d in machine.devices] == [
        ("H100", "cuda", 80)
    ]


def test_a_place_and_its_region_are_asked_for_and_spot_has_its_own_price():
    catalogue = Catalogue(row("AWS", 1, 6.9, "us-east-1"), row("AWS", 1, 5.0, "us-west-2"))
    sky = host(infra="aws/us-east-1", spot=True).sky
    offers = find_offers(catalogue, sky)  # pyright: ignore[reportArgumentType]
    assert catalogue.asked == [("H100", ["aws"])]
    assert [(each.region, each.price) for each in offers] == [("us-east-1", 1.0)]


def test_a_cluster_of_ones_own_costs_nothing():
    catalogue = Catalogue(row("Kubernetes", 1, 0.0, ""))
    sky = host(infra="k8s/lab", max_price=0.01).sky
    (offer,) = find_offers(catalogue, sky)  # pyright: ignore[reportArgumentType]
    assert catalogue.asked == [("H100", ["kubernetes"])]
    assert allowed_offer(host(infra="k8s/lab", max_price=0.01), [offer]) == offer


def test_what_is_too_dear_or_not_listed_is_refused_with_the_next_move():
    rented = host(max_price=2.0)
    catalogue = Catalogue(row("RunPod", 1, 2.5))
    offers = find_offers(catalogue, rented.sky)  # pyright: ignore[reportArgumentType]
    with pytest.raises(FarError) as error:
        allowed_offer(rented, offers)
    assert "2.50 an hour, and max_price is 2; nothing was launched" in error.value.message
    assert "Raise max_price of [hosts.rented]" in error.value.hint
    with pytest.raises(FarError) as error:
        allowed_offer(rented, [])
    assert "lists no H100:1" in error.value.message

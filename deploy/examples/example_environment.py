"""An environment as it is written for TRL's `environment_factory`: public methods are the model's tools."""

from __future__ import annotations

from typing import Any


class Shop:
    """The model must look up a price and buy with the right amount."""

    def reset(self, item: str, price: int, **row: Any) -> str:
        self._item, self._price, self._paid = item, price, 0
        return f" The shop sells {item}."

    def price_of(self, item: str) -> int:
        """Say what an item costs.

        Args:
            item: name of the item
        """
        if item != self._item:
            raise ValueError(f"the shop has no {item}")
        return self._price

    def buy(self, item: str, amount: int) -> str:
        """Buy an item.

        Args:
            item: name of the item
            amount: what is paid
        """
        self._paid = amount if item == self._item else 0
        return "thank you" if self._paid == self._price else "that is not the price"

    def get_reward(self) -> float:
        return float(self._paid == self._price)

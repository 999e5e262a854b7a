"""Notices when a buffer that graphs bind has moved: they would go on reading where it was."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from midstream.errors import ContractError


def check_addresses(before: Mapping[str, int], after: Mapping[str, int], name: str) -> None:
    """Raise ContractError if a buffer moved between two looks."""
    moved = [key for key, address in after.items() if before.get(key) != address]
    if moved:
        raise ContractError(
            f"{name}: the buffers {', '.join(moved)} moved since they were bound; expected fixed addresses; "
            "write into them in place, or capture again"
        )


class ParameterWatch:
    """Addresses of all parameters and buffers of a module, looked up again without walking its tree.

    A look costs about 0.1 us per tensor; a tensor put in the place of another is noticed as well.
    """

    def __init__(self, module: nn.Module) -> None:
        self._holders: list[dict[str, Tensor]] = []
        self._keys: list[str] = []
        self.names: list[str] = []
        for prefix, child in module.named_modules():
            for holder in (child._parameters, child._buffers):
                for key, tensor in holder.items():
                    if tensor is not None:
                        self._holders.append(holder)
                        self._keys.append(key)
                        self.names.append(f"{prefix}.{key}".lstrip("."))
        self._bound = self._look()

    def moved(self) -> list[str]:
        """Names of the tensors that are elsewhere now than when they were bound."""
        found = self._look()
        if found == self._bound:
            return []
        pairs = zip(self.names, self._bound, found, strict=True)
        return [name for name, before, now in pairs if before != now]

    def bind(self) -> None:
        """From now on the present addresses are the right ones."""
        self._bound = self._look()

    def _look(self) -> list[int]:
        try:
            return list(map(Tensor.data_ptr, map(dict.__getitem__, self._holders, self._keys)))
        except KeyError:  # one was taken away: none counts as where it was
            return [-1] * len(self._keys)

"""The list of a stage's layers, which are named by their number in the whole model."""

from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from operator import index as to_index
from typing import Self

from torch import nn


class NumberedLayers(nn.ModuleList):
    """A list of layers named by their numbers in the whole model, so that parameters have one name in any layout.

        stage with layers 4 to 7     layers[0] is the module "4"     for layer in layers: 4, 5, 6, 7

    An index is the place in the stage, as in Megatron; the string "4" names the layer. `keys`, `values` and `items` are
    those of an `nn.ModuleDict` by name. A layer that is appended has the next number; one that is deleted leaves the
    others their names. Raises IndexError and KeyError for a layer that another stage has.
    """

    def __init__(self, layers: Mapping[int, nn.Module]):
        """layers: number in the whole model -> module, in the order in which they run."""
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)

    def __getitem__(self, place: int | slice | str) -> nn.Module:  # type: ignore[override]
        if isinstance(place, slice):
            return NumberedLayers({int(name): layer for name, layer in list(self.items())[place]})
        return self._modules[self._get_abs_string_index(place)]

    def __delitem__(self, place: int | slice | str) -> None:  # type: ignore[override]
        names = list(self._modules)[place] if isinstance(place, slice) else [self._get_abs_string_index(place)]
        for name in names:
            del self._modules[name]

    def append(self, module: nn.Module) -> Self:
        """Add a layer behind the others, under the next number."""
        self.add_module(str(int(next(reversed(self._modules), -1)) + 1), module)
        return self

    def extend(self, modules: Iterable[nn.Module]) -> Self:
        """Append several layers."""
        for module in modules:
            self.append(module)
        return self

    def insert(self, index: int, module: nn.Module) -> None:
        """Raise NotImplementedError: there is no number, and so no name, between two layers."""
        raise NotImplementedError(
            f"NumberedLayers: a layer cannot be inserted at {index}, since the layers behind it are named by their "
            "numbers in the whole model; build the model with this layer"
        )

    def _get_abs_string_index(self, idx: int | str) -> str:
        """Return the name of the layer at this place; a name itself. torch's list asks it to replace a layer."""
        return idx if isinstance(idx, str) else list(self._modules)[to_index(idx)]

    def keys(self) -> KeysView[str]:
        """Return the layers' names, which are their numbers in the whole model."""
        return self._modules.keys()

    def values(self) -> ValuesView[nn.Module]:
        """Return the layers in order."""
        return self._modules.values()

    def items(self) -> ItemsView[str, nn.Module]:
        """Return (name, layer) of the layers in order."""
        return self._modules.items()

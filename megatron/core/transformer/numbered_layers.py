"""The list of a stage's layers, which are named by their number in the whole model."""

from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from operator import index

from torch import nn


class NumberedLayers(nn.ModuleList):
    """A list of layers named by their numbers in the whole model, so that parameters have one name in any layout.

        stage with layers 4 to 7     layers[0] is the module "4"     for layer in layers: 4, 5, 6, 7

    An index is the place in the stage, as in Megatron; the string "4" names the layer. `keys`, `values` and `items` are
    those of an `nn.ModuleDict` by name. Raises IndexError and KeyError for a layer that another stage has.
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

    def _get_abs_string_index(self, idx: int | str) -> str:
        """Return the name of the layer at this place; a name itself. torch's list asks it to replace a layer."""
        return idx if isinstance(idx, str) else list(self._modules)[index(idx)]

    def keys(self) -> KeysView[str]:
        """Return the layers' names, which are their numbers in the whole model."""
        return self._modules.keys()

    def values(self) -> ValuesView[nn.Module]:
        """Return the layers in order."""
        return self._modules.values()

    def items(self) -> ItemsView[str, nn.Module]:
        """Return (name, layer) of the layers in order."""
        return self._modules.items()

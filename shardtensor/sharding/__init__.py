"""Pure arithmetic of shardings: mesh, spec, split rule, rule language, index and view arithmetic, copy plans.

The main nouns are `Mesh`, `PartitionSpec`, `NamedSharding`, `Grid` (the shards of an array of a given shape), `Region`
(a box of a result and the operand elements that fill it) and `ViewSpec` (NumPy's view arithmetic without arrays).
Functions take shapes, specs and indices, and return shapes, boxes and integers.

The names that `jax.sharding` has can be imported from this package, too.

No code here computes with arrays: neither tensors nor the namespaces of backends may be imported.
"""

from typing import TYPE_CHECKING, Any

from shardtensor.backend.device import Device as Device
from shardtensor.core import ABOVE
from shardtensor.hints import missing
from shardtensor.sharding.abstract_mesh import AbstractMesh as AbstractMesh
from shardtensor.sharding.layout import NamedSharding as NamedSharding
from shardtensor.sharding.layout import SingleDeviceSharding as SingleDeviceSharding
from shardtensor.sharding.mesh import Mesh as Mesh
from shardtensor.sharding.mesh import get_mesh as get_mesh
from shardtensor.sharding.mesh import make_mesh as make_mesh
from shardtensor.sharding.mesh import set_mesh as set_mesh
from shardtensor.sharding.mesh import use_mesh as use_mesh
from shardtensor.sharding.spec import P as P
from shardtensor.sharding.spec import PartitionSpec as PartitionSpec

if TYPE_CHECKING:  # They are declared above this package.
    auto_axes: Any
    explicit_axes: Any
    reshard: Any
else:

    def __getattr__(name: str) -> Any:
        if name in ("auto_axes", "explicit_axes", "reshard"):
            return getattr(ABOVE["array_namespace"](), name)
        raise missing(__name__, name)

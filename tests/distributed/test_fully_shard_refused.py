"""What is not covered of `fully_shard` yet: refused by name, in every process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from adadp.integrations.opacus import PrivacyEngine as OpacusEngine
from distributed.sharding import INPUTS, Loop, layers, said, sharded
from distributed.team import values
from distributed.work import CLIPPINGS, FEATURES, LOT, data


def refusals(rank: int, size: int, folder: str) -> dict[str, str]:
    """What is not covered yet, in every process alike."""

    def with_policy(**settings: Any) -> Any:
        model: Any = layers()
        fully_shard(model[0], **settings)
        return fully_shard(model)

    def a_part() -> Any:
        model: Any = layers()
        fully_shard(model[0])
        return model

    def left_out() -> Any:
        model: Any = layers()
        return fully_shard(model, ignored_params={model[0].bias})

    def gathered() -> Any:
        model = sharded()
        model[0].unshard()
        return model

    def of_one() -> Any:
        groups = [dist.new_group([one]) for one in range(size)]
        return fully_shard(layers(), mesh=DeviceMesh.from_group(groups[rank], "cpu"))

    def other_buffers() -> Any:
        model = layers()
        model.register_buffer("kept", torch.full((3,), float(rank)))
        return sharded(lambda: model)

    def another_engine() -> None:
        model = sharded()
        OpacusEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
            data_loader=DataLoader(data(), batch_size=LOT), max_grad_norm=1.0,
        )  # fmt: skip

    def resumed() -> None:
        plain = Loop(layers()).run()
        Loop(engine={"resume": plain.engine.state_dict(), "seed": None})

    def tied() -> Any:
        model: Any = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 2))
        model[1].weight = model[0].weight
        return sharded(lambda: model)

    def a_child_ran() -> Any:
        model = sharded()
        model[0](INPUTS)
        model[0].reshard()
        return model

    replicas = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicas", "shards"))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    models: dict[str, Callable[[], Any]] = {
        "precision": lambda: with_policy(mp_policy=half),
        "precision of sums": lambda: with_policy(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
        "offload": lambda: with_policy(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "replicas": lambda: fully_shard(layers(), mesh=replicas),
        "columns": lambda: fully_shard(
            nn.Sequential(nn.Linear(FEATURES, 2, bias=False)), shard_placement_fn=lambda _: Shard(1)
        ),
        "a part": a_part,
        "left out": left_out,
        "gathered": gathered,
        "processes of its own": of_one,
        "compiled": lambda: torch.compile(sharded()),
        "other buffers": other_buffers,
        "tied in two groups": tied,
        "a child ran": a_child_ran,
    }
    found = {name: said(lambda made=made: Loop(made())) for name, made in models.items()}
    for name, clipping in CLIPPINGS.items():
        given = {"clipping": clipping if isinstance(clipping, str) else clipping(), "max_grad_norm": None}
        found[f"clipping {name}"] = said(lambda given=given: Loop(**given))
    found["another step"] = said(lambda: Loop(step_class=lambda *_, **__: None))
    loop = Loop()
    path = f"{folder}/{rank}"
    found["wrapped since"] = said(lambda: DistributedDataParallel(loop.model)(INPUTS))
    found["checkpoint"] = said(lambda: loop.engine.save_checkpoint(path, module=loop.model))
    found["state"] = said(loop.engine.state_dict)
    found["another engine"] = said(another_engine)
    found["resumed"] = said(resumed)
    return found


NOT_YET = "cannot be trained with"
REFUSED = {
    "precision": "fully_shard with mp_policy=",
    "precision of sums": "fully_shard with mp_policy=",
    "offload": "fully_shard with offload_policy=",
    "replicas": "not over all processes in one dimension",
    "columns": "is placed as",
    "a part": "call fully_shard(model), too",
    "left out": "left out of fully_shard (ignored_params)",
    "gathered": "model.reshard()",
    "processes of its own": "not over all processes in one dimension",
    "compiled": "pass the model itself",
    "tied in two groups": "fully_shard refuses the model: Parameter",
    "a child ran": "fully_shard refuses the model: FSDP state",
    "other buffers": "were not given the same: the weights",
    "wrapped since": "Error",
    "another step": f"{NOT_YET} an algorithm that releases more than a gradient",
    "checkpoint": f"{NOT_YET} a checkpoint",
    "state": f"{NOT_YET} a checkpoint",
    "another engine": f"{NOT_YET} the engine of adadp.integrations.opacus",
    "resumed": f"{NOT_YET} a checkpoint",
    **{f"clipping {name}": f"{NOT_YET} the clipping" for name in CLIPPINGS},
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("team")
    return values(2, folder, refusals, str(folder))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_covered_is_refused_by_name(refused: list[dict[str, str]], name: str) -> None:
    for found in refused:
        assert REFUSED[name] in found[name]
        assert not found[name].startswith("nothing was raised")

"""Opacus' names, so that a loop written for Opacus runs with the import changed.

    from adadp.integrations.opacus import BatchMemoryManager, DPLSTM, ModuleValidator, PrivacyEngine

Whatever a loop imports from `opacus` or from one of its modules is imported from here, by the same name. Each name does
what the engine does anyway, or refuses and says what to do instead (docs/opacus.md has all of them). New code needs
none of this: `adadp.PrivacyEngine`, `make_private(max_physical_batch_size=...)` and `adadp.fix` do the same.

| file        | Opacus' names                                                      |
| ----------- | ------------------------------------------------------------------ |
| `engine`    | PrivacyEngine, PrivacyEngineAdaptiveClipping                       |
| `optimizer` | DPOptimizer                                                        |
| `loader`    | DPDataLoader, BatchMemoryManager                                   |
| `accountant`| what `engine.accountant` is, get_noise_multiplier                  |
| `criterion` | the criterion of ghost clipping                                    |
| `schedulers`| of the noise multiplier and of the clipping bound                  |
| `layers`    | DPLSTM, DPGRU, DPRNN, their cells, DPMultiheadAttention, DDP       |
| `module`    | ModuleValidator, register_grad_sampler, attributes of the model    |
| `refused`   | names that can be imported, and say what to do when they are used  |
"""

from adadp.integrations.opacus.accountant import Accountant, get_noise_multiplier
from adadp.integrations.opacus.criterion import DPLossFastGradientClipping, DPTensorFastGradientClipping
from adadp.integrations.opacus.engine import PrivacyEngine, PrivacyEngineAdaptiveClipping
from adadp.integrations.opacus.layers import (
    DPGRU,
    DPLSTM,
    DPRNN,
    DifferentiallyPrivateDistributedDataParallel,
    DPGRUCell,
    DPLSTMCell,
    DPMultiheadAttention,
    DPRNNCell,
)
from adadp.integrations.opacus.loader import BatchMemoryManager, DPDataLoader
from adadp.integrations.opacus.module import ModuleValidator, register_grad_sampler, register_norm_sampler
from adadp.integrations.opacus.notice import OpacusNotice
from adadp.integrations.opacus.optimizer import DPOptimizer
from adadp.integrations.opacus.refused import (
    DPLightningDataModule,
    DPPerLayerOptimizer,
    GaussianAccountant,
    GradSampleModule,
    PRVAccountant,
    RDPAccountant,
    UniformWithReplacementSampler,
    forbid_accumulation_hook,
    make_functional,
    register_module_fixer,
    register_module_validator,
    wrap_model,
)
from adadp.integrations.opacus.schedulers import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    StepGradClip,
    StepNoise,
)

__all__ = [
    "DPGRU",
    "DPLSTM",
    "DPRNN",
    "Accountant",
    "BatchMemoryManager",
    "DPDataLoader",
    "DPGRUCell",
    "DPLSTMCell",
    "DPLightningDataModule",
    "DPLossFastGradientClipping",
    "DPMultiheadAttention",
    "DPOptimizer",
    "DPPerLayerOptimizer",
    "DPRNNCell",
    "DPTensorFastGradientClipping",
    "DifferentiallyPrivateDistributedDataParallel",
    "ExponentialGradClip",
    "ExponentialNoise",
    "GaussianAccountant",
    "GradSampleModule",
    "LambdaGradClip",
    "LambdaNoise",
    "ModuleValidator",
    "OpacusNotice",
    "PRVAccountant",
    "PrivacyEngine",
    "PrivacyEngineAdaptiveClipping",
    "RDPAccountant",
    "StepGradClip",
    "StepNoise",
    "UniformWithReplacementSampler",
    "forbid_accumulation_hook",
    "get_noise_multiplier",
    "make_functional",
    "register_grad_sampler",
    "register_module_fixer",
    "register_module_validator",
    "register_norm_sampler",
    "wrap_model",
]

"""A gated multilayer perceptron: PyTorch's matrix products around the kernels of swiglu or geglu."""

from liger_core import gated_mlp
from liger_core.contract import implements
from liger_core.host.gated_mlp import Activation, GatedMLP
from liger_triton_ascend.ops import geglu, swiglu
from liger_triton_ascend.ops._linear import LINEAR

host = GatedMLP(LINEAR, Activation(swiglu.forward, swiglu.backward), Activation(geglu.forward, geglu.backward))
forward = implements(gated_mlp)(host.forward)
backward = host.backward
keeps = host.keeps

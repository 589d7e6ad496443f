"""minimegatron: the techniques that Megatron-LM trains frontier models with; README.md says where to begin reading.

Import what you need from its package: `minimegatron.comm.mesh`, `minimegatron.layers.linear`,
`minimegatron.models.decoder`, `minimegatron.training.step` ... Importing the package itself costs nothing.
"""

__version__ = "1.0.0rc1"

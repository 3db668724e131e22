"""The models of the zoo, by name."""

from experiments.zoo.base import ZooModel

MODELS = {
    "muon decoder": ZooModel("muon_decoder", (), "linen decoder, remat, tied embedding; muon with a schedule"),
    "lora": ZooModel("lora", (), "nnx LoRA adapters, the rest frozen; adam"),
    "state space": ZooModel("scan_ssm", (), "nnx, Mamba-like associative scan, scanned layers, typed dropout keys"),
    "gan": ZooModel("gan", (), "two nnx models and optimisers, batch norm, transposed convolutions"),
    "fourier operator": ZooModel("fourier_operator", (), "linen, FFTs, complex weights"),
    "physics": ZooModel("physics", (), "second derivatives; L-BFGS with a line search"),
    "t5": ZooModel("t5", ("transformers",), "FlaxT5, dropout key in the state; clipping, adafactor"),
    "vit": ZooModel("vit", ("transformers",), "FlaxViT, gradients accumulated in optax.MultiSteps"),
    "diffusion unet": ZooModel("diffusion_unet", ("diffusers",), "conditional U-Net, noise drawn in the step; EMA"),
    "graph network": ZooModel("graph_network", ("jraph", "dm-haiku"), "messages by segment_sum on padded graphs"),
    "resnet": ZooModel("haiku_resnet", ("dm-haiku", "jmp"), "batch norm's state, float16, dynamic loss scale"),
    "private lstm": ZooModel("private_lstm", ("dm-haiku",), "gradients of examples; clipping and noise (DP-SGD)"),
    "ppo": ZooModel("ppo", ("gymnax",), "rollouts, advantages, epochs and minibatches, all in scans"),
    "neural ode": ZooModel("neural_ode", ("diffrax", "equinox"), "adaptive steps, checkpointed gradient; adabelief"),
    "convnet": ZooModel("keras_convnet", ("keras",), "keras, depthwise convolutions, stateless optimiser", True),
    "bayesian": ZooModel("bayesian", ("numpyro",), "variational inference by handlers", True),
    "equivariant": ZooModel("equivariant", ("e3nn-jax",), "tensor products along edges, forces", True),
}

"""PyTriton with the inputs and outputs of NeMo-Aligner's reward server, and no model. In: the port."""

import signal
import sys

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


@batch
def infer(**inputs):
    rows = len(next(iter(inputs.values())))
    return {"rewards": np.zeros((rows, 1), np.float32), "exceeded": np.zeros((rows, 1), np.int32)}


signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
places = {"http_address": "127.0.0.1", "http_port": int(sys.argv[1]), "allow_grpc": False, "allow_metrics": False}
with Triton(config=TritonConfig(allow_http=True, **places)) as triton:
    triton.bind(
        model_name="reward_model",
        infer_func=infer,
        inputs=[
            Tensor(name="sentences", shape=(-1,), dtype=bytes, optional=True),
            Tensor(name="tokens", shape=(-1,), dtype=np.int64, optional=True),
            Tensor(name="sequence_lengths", shape=(-1,), dtype=np.int64, optional=True),
            Tensor(name="add_EOS", shape=(1,), dtype=np.bool_, optional=True),
        ],
        outputs=[
            Tensor(name="rewards", shape=(1,), dtype=np.float32),
            Tensor(name="exceeded", shape=(1,), dtype=np.int32),
        ],
        config=ModelConfig(max_batch_size=4096),
    )
    triton.serve()

"""Broadcasts a safetensors file to the workers of a vLLM server over NCCL.

``send.py URL FILE MASTER_ADDRESS MASTER_PORT WORLD_SIZE TIMEOUT_S``, in vLLM's environment, with the server's
token in ``LEHR_SERVER_TOKEN``. Imports nothing of lehr. Written after the source of vLLM 0.32, and not run.
"""

import os
import sys

import requests
import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
)


class Client(HTTPVLLMWeightSyncClient):
    """The server's control requests, with its token."""

    def _post(self, path, json=None):
        headers = {"Authorization": f"Bearer {os.environ['LEHR_SERVER_TOKEN']}"}
        answer = requests.post(f"{self.base_url}/{path}", json=json, timeout=self.timeout, headers=headers)
        answer.raise_for_status()


class FileSource(WeightSource):
    """The tensors of one file, in the order of their names."""

    def __init__(self, path):
        self.file = safe_open(path, framework="pt")
        self.names = sorted(self.file.keys())

    def metadata(self):
        """Return name, dtype and shape of each tensor."""
        tensors = ((name, self.file.get_tensor(name)) for name in self.names)
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]

    def __iter__(self):
        for name in self.names:
            yield name, self.file.get_tensor(name).to(torch.accelerator.current_accelerator())


def main():
    """Open the group, send, and close it."""
    url, path, address, port, world_size, timeout_s = sys.argv[1:]
    client = Client(url, float(timeout_s))
    info = NCCLTrainerInitInfo(master_address=address, master_port=int(port), world_size=int(world_size))
    engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=FileSource(path))
    engine.send_weights()
    client.shutdown_weight_transfer_engine()


if __name__ == "__main__":
    main()

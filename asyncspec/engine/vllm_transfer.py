"""How weights that have arrived get into vLLM's model. Import it after `vllm_process.prepare`."""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncspec.engine import vllm_process

NAME = "asyncspec"  # under which vLLM knows it


class _InProcessTransfer(WeightTransferEngine[dict, dict]):
    """Loads tensors of this process, in checkpoint form, into the model of vLLM's weight update session."""

    def init_transfer_engine(self, init_info: dict) -> None:
        pass

    def parse_update_info(self, update_dict: dict[str, Any]) -> dict[str, Any]:
        return update_dict

    def start_weight_update(self) -> None:
        if self.device.type == "cpu":
            # Experts compute with packed copies, which vLLM makes only with their kernel: have it make that again.
            for layer in self.model.modules():
                if isinstance(layer, RoutedExperts):
                    layer.quant_method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        self.model.load_weights(update_info["tensors"])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            vllm_process.pack_heads(self.model)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(NAME, _InProcessTransfer)

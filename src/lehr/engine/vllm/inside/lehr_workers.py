"""Methods that a vLLM server's workers get from lehr (``--worker-extension-cls lehr_workers.Reload``).

Runs in vLLM's environment and imports nothing of lehr.
"""


class Reload:
    """Mixed into the worker's class."""

    def lehr_reload(self, weights_path):
        """Reload every weight, the packed copies included.

        On a CPU vLLM (0.32) computes with a packed copy of each weight, made when that weight is loaded. A head
        that is tied to the embedding is never loaded itself: its copy would stay that of the old weights.
        """
        self.reload_weights(weights_path=weights_path)
        for module in self.model_runner.get_model().modules():
            if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

from hydra.core.config_store import ConfigStore
ConfigStore.instance().store(group="hydra/launcher", name="optimus_cc", node={"_target_": "hydra_plugins.optimus_cc_launcher.OptimusLauncher"}, provider="optimus_cc")

"""Two packages from one tree: the plugin, and the stand-alone kernel library it runs on.

``kernels/`` is a folder, not a package: SGLang depends on a distribution that is imported as
``kernels``, which a package of that name here would hide.  Everything else is in pyproject.toml.
"""

from setuptools import setup

setup(
    packages=["sglang_eagle3_ext", "eagle3_kernels"],
    package_dir={"sglang_eagle3_ext": "sglang_eagle3_ext", "eagle3_kernels": "kernels/eagle3_kernels"},
)

"""Lightning under both of its names, `lightning` and `pytorch_lightning`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from importlib.abc import Loader

# Find out which package the user's Trainer comes from: `lightning`, `pytorch_lightning`, or either in one process.
#
# Both hold the same code under two names, so neither recognises the classes of the other. This module imports neither before
# it has to, because an unused one would slow down every start of a worker. The command line and agents import it, too.

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
DISTRIBUTIONS = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch-lightning"}

MALICIOUS = ("2.6.2", "2.6.3")
"""Releases of `lightning` that steal credentials when they are imported (April 2026)."""


class TrainerFn(str, Enum):
    """Lightning's names for a Trainer's activity. Members of both packages compare equal to these."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    __str__ = str.__str__


def loaded_packages() -> list[str]:
    """Packages that this process has imported."""
    return [package for package in PACKAGES if hasattr(sys.modules.get(package), "Trainer")]  # skips half-imported ones


def default_package() -> str:
    """Return the package to use where no Trainer determines it: an imported one, else an installed one.

    Raises:
        ImportError: none of them is installed, or only a release that must not be imported.
    """
    if loaded := loaded_packages():
        return loaded[0]
    for package in PACKAGES:
        if is_installed(package):
            _refuse_malicious(package)
            return package
    raise ImportError(
        "lightning_dlrover needs PyTorch Lightning, but neither lightning nor pytorch_lightning is installed: "
        "pip install 'lightning>=2.6.4', or pip install 'pytorch-lightning>=2.6.4'"
    )


def package_of(thing: object) -> str:
    """Return the package that the class of `thing` comes from, or is derived from."""
    for cls in type(thing).__mro__:
        for package in PACKAGES:
            if cls.__module__ == package or cls.__module__.startswith(f"{package}."):
                return package
    raise TypeError(f"{type(thing).__module__}.{type(thing).__qualname__} belongs to none of {', '.join(PACKAGES)}")


def submodule(package: str, name: str) -> ModuleType:
    """Return a module of the package, such as `callbacks`."""
    return importlib.import_module(f"{package}.{name}")


def fabric_submodule(package: str, name: str) -> ModuleType:
    """Return a module of the Fabric that the package is built on, such as `utilities.seed`."""
    return importlib.import_module(f"{FABRICS[package]}.{name}")


def release(package: str) -> str:
    """Return the version of an imported package."""
    return str(sys.modules[package].__version__)


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package.partition(".")[0]) is not None
    except ImportError:
        return False


def _refuse_malicious(package: str) -> None:
    from importlib import metadata  # here, as it would be half of the time in which this package is imported

    name = DISTRIBUTIONS[package]
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return
    if name == "lightning" and version in MALICIOUS:
        raise ImportError(
            f"lightning {version} is installed, a malicious release that steals credentials when it is imported; it was not "
            "imported here. Uninstall it, replace the credentials of this machine, then pip install 'lightning>=2.6.4'"
        )


# --- classes of either package ---------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from lightning.pytorch import callbacks, loggers

    Checkpoint = callbacks.Checkpoint
    EarlyStopping = callbacks.EarlyStopping
    LearningRateFinder = callbacks.LearningRateFinder
    ModelCheckpoint = callbacks.ModelCheckpoint
    ProgressBar = callbacks.ProgressBar
    CSVLogger = loggers.CSVLogger
    TensorBoardLogger = loggers.TensorBoardLogger
else:

    class _Either(type):
        """A class that counts instances of both packages' classes of its name as its own."""

        home: str

        def __instancecheck__(cls, instance: object) -> bool:
            return any(
                isinstance(instance, getattr(submodule(package, cls.home), cls.__name__)) for package in loaded_packages()
            )

    CALLBACKS = ("Checkpoint", "EarlyStopping", "LearningRateFinder", "ModelCheckpoint", "ProgressBar")
    Checkpoint, EarlyStopping, LearningRateFinder, ModelCheckpoint, ProgressBar = (
        _Either(name, (), {"home": "callbacks"}) for name in CALLBACKS
    )
    CSVLogger, TensorBoardLogger = (_Either(name, (), {"home": "loggers"}) for name in ("CSVLogger", "TensorBoardLogger"))


# --- actions when a package is imported --------------------------------------------------------------------------------------

_actions: list[Callable[[str], None]] = []
_awaited: dict[str, Callable[[ModuleType], None]] = {}  # actions for single modules, by name


def on_import(action: Callable[[str], None]) -> None:
    """Call `action` with each of the packages: now if it is imported already, else when the user imports it."""
    _actions.append(action)
    for package in loaded_packages():
        action(package)


def when_imported(module: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action` once with a module: now if it is imported already, else when it is imported."""
    if module in sys.modules:
        action(sys.modules[module])
    else:
        _awaited[module] = action


def watch_imports() -> None:
    """Watch imports from now on, so that the actions of `on_import` and `when_imported` are called. Imports nothing."""
    if not any(isinstance(finder, _ImportWatch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportWatch())


class _ImportWatch:
    """Leaves finding to the other finders, and wraps the loader when one of the packages or an awaited module is imported.

    Neither this nor the loader has a base class: `importlib.abc` takes longer to import than the rest of this package.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in PACKAGES and fullname not in _awaited:
            return None
        others: Iterable[Any] = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        for finder in others:
            spec: ModuleSpec | None = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _NotingLoader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _NotingLoader:
    """The module's own loader, followed by the actions of `on_import` and `when_imported`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if (awaited := _awaited.pop(module.__name__, None)) is not None:
            awaited(module)
        for action in _actions if module.__name__ in PACKAGES else ():
            action(module.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


# A strategy for Trainers of `lightning` and of `pytorch_lightning`.
#
# This module decides which package's `DDPStrategy` is behind an instance. `strategy.py` holds the strategy itself.

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy
    from typing_extensions import Self
else:
    DDPStrategy = object  # `_concrete` brings in a package's own


class EitherStrategy(DDPStrategy):
    """Base of strategies that inherit, through `super()`, from the `DDPStrategy` of the Trainer's own package.

    An instance belongs to a subclass that has the `DDPStrategy` of one package behind it: the package that is imported when
    the instance is made. When a Trainer of the other package takes the instance, its class changes. Both have the same
    attributes.

    `__new__` is defined here because jsonargparse would take the `__new__` of the class itself as the signature of the user's
    settings.
    """

    _package: ClassVar[str] = ""  # set on concrete classes only

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return super().__new__(cls if cls._package else _concrete(cls, default_package()))

    @property
    def accelerator(self) -> Any:
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        """The first access of a Trainer to its strategy, which reveals the Trainer's package."""
        if accelerator is not None:
            self._serve(package_of(accelerator))
        self._accelerator = accelerator

    def _serve(self, package: str) -> None:
        """Become a strategy of the Trainer's own package."""
        if package == self._package:
            return
        if release(package) != release(self._package):
            raise RuntimeError(
                f"this strategy was made for {self._package} {release(self._package)}, its Trainer is of {package} "
                f"{release(package)}: install the same release of both, or import one of them only, before the strategy is made"
            )
        self.__class__ = _concrete(type(self).__bases__[0], package)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self).__bases__[0], self._package), self.__dict__


@functools.cache
def _concrete(cls: type[EitherStrategy], package: str) -> type[Any]:
    """Return a subclass with the package's own `DDPStrategy` behind it."""
    base = submodule(package, "strategies").DDPStrategy
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "_package": package}
    concrete: type[Any] = type(base)(cls.__name__, (cls, base), names)
    return concrete


def _rebuilt(cls: type[EitherStrategy], package: str) -> EitherStrategy:
    """Return an unpickled instance, still without its attributes."""
    concrete: type[EitherStrategy] = _concrete(cls, package)
    return concrete.__new__(concrete)


# Trainers, and the command line that Lightning makes of them, check whether this is one of their own strategies.
on_import(lambda package: submodule(package, "strategies").DDPStrategy.register(EitherStrategy))

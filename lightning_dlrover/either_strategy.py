"""A strategy for Trainers of `lightning` and of `pytorch_lightning`.

Decides whose `DDPStrategy` stands behind an instance; what the strategy does is `strategy.py`'s.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lightning_dlrover.packages import default_package, on_import, package_of, release, submodule

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy
else:
    DDPStrategy = object  # a package's own comes in with `_concrete`

__all__ = ["EitherStrategy"]


class EitherStrategy(DDPStrategy):
    """Base of strategies whose `super()` leads to the `DDPStrategy` of the package that the Trainer comes from.

    An instance is of a subclass that has the `DDPStrategy` of one package behind it: the one that is imported when the instance
    is made. When a Trainer of the other package takes the instance, that becomes its class. Attributes are alike in both.

    `__new__` is here, as jsonargparse would take that of the class itself for the signature of the user's settings.
    """

    _package: ClassVar[str] = ""  # of concrete classes only

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return super().__new__(cls if cls._package else _concrete(cls, default_package()))

    @property
    def accelerator(self) -> Any:
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        """The first thing that a Trainer does to its strategy."""
        if accelerator is not None:
            self._serve(package_of(accelerator))
        self._accelerator = accelerator

    def _serve(self, package: str) -> None:
        """Become a strategy of the package that the Trainer comes from."""
        if package == self._package:
            return
        if release(package) != release(self._package):
            raise RuntimeError(
                f"this strategy was made for {self._package} {release(self._package)}, its Trainer is of {package} "
                f"{release(package)}: install the same release of both, or import one of them only, before the strategy is made"
            )
        self.__class__ = _concrete(_abstract(type(self)), package)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (_abstract(type(self)), self._package), self.__dict__


@functools.cache
def _concrete(cls: type[EitherStrategy], package: str) -> type[Any]:
    """A subclass with the package's own `DDPStrategy` behind it."""
    base = submodule(package, "strategies").DDPStrategy
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "_package": package}
    concrete: type[Any] = type(base)(cls.__name__, (cls, base), names)
    return concrete


def _abstract(concrete: type[EitherStrategy]) -> type[EitherStrategy]:
    """The class that `_concrete` was given."""
    return concrete.__bases__[0]


def _rebuilt(cls: type[EitherStrategy], package: str) -> EitherStrategy:
    """Unpickled, without its attributes yet."""
    concrete: type[EitherStrategy] = _concrete(cls, package)
    return concrete.__new__(concrete)


# Trainers, and the command line that Lightning makes of them, ask whether this is a strategy of theirs.
on_import(lambda package: submodule(package, "strategies").DDPStrategy.register(EitherStrategy))

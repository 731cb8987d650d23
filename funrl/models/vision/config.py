"""Sizes of a vision tower, and the config of a decoder that has one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from funrl.models.decoder.config import Config
from funrl.models.errors import ModelError
from funrl.models.model import check_sizes
from funrl.models.vision.tiles import Tiles

CHANNELS = 3  # red, green, blue
FRAMES = 2  # of a patch; a picture is two equal ones
NO_WINDOW = 1 << 30  # side in tokens: of no picture


@dataclass(frozen=True, kw_only=True)
class PictureLayout:
    """Layout of pictures, and of their tokens among others.

    Attributes:
      side: patches of a side of every picture, which is squashed to a square; None: pictures keep their proportions.
      frame: text before and after a picture, where a chat template has one token `begin` for all of it; None: the
        template has the placeholder too.
      mutual: tokens of a picture see one another in the decoder; all have one side.
      tiles: of each picture; None: it is one.
    """

    side: int | None = None
    frame: str | None = None
    mutual: bool = False
    tiles: Tiles | None = None

    @property
    def square(self) -> int:
        """`side` of squashed pictures. Raises: TypeError, pictures keep their proportions."""
        if self.side is None:
            raise TypeError("the pictures keep their proportions")
        return self.side

    @property
    def tiling(self) -> Tiles:
        """`tiles` of pictures in tiles. Raises: TypeError, a picture is one tile."""
        if self.tiles is None:
            raise TypeError("the pictures have no tiles")
        return self.tiles


@dataclass(frozen=True, kw_only=True)
class TowerForm:
    """Form of the layers of a tower.

    Attributes:
      norm: "rms", or "layer", which subtracts the mean and has a bias.
      gated: the mlp is a SwiGLU; else two products with a GELU between them.
      patch_bias: the embedding of patches has a bias.
      table: side of a square of learned positions, which is stretched over each picture; 0: there is none.
      deep_layers: layers of the tower whose states are added behind the first layers of the decoder, one each.
      mean, std: of the pixels of each channel, from 0 to 1.
      frames: copies of a picture that a patch is the product of.
      joined: queries, keys and values are one product.
      rotates: queries and keys are rotated by rows and columns.
      merger: what makes tokens of neighbouring patches: an mlp of all of them, normalized ("mlp") or not ("plain"), or
        their mean, normalized and projected.
      idle_norm: files hold a norm behind the last layer, which is not computed.
      eps: of the norms.
    """

    norm: Literal["rms", "layer"] = "rms"
    gated: bool = True
    patch_bias: bool = False
    table: int = 0
    deep_layers: tuple[int, ...] = ()
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    frames: int = FRAMES
    joined: bool = True
    rotates: bool = True
    merger: Literal["mlp", "plain", "mean"] = "mlp"
    idle_norm: bool = False
    eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Sizes of a tower that turns the patches of pictures into hidden states of a decoder.

    A patch is [3, patch, patch] numbers. `merge`^2 neighbouring patches become one hidden state of the decoder.

    Attributes:
      layers, embed, heads, inner: sizes of the tower's own layers.
      placeholder: id of the token that stands for one hidden state of a picture; no padding token.
      patch: side of a patch, in pixels.
      merge: side of the square of patches that become one token.
      window: side of the square of pixels that the patches of most layers see; None: their whole picture.
      whole_layers: layers whose patches see their whole picture.
      banned: further ids that no policy may sample, such as placeholders of videos.
      begin, end: ids of the tokens around a picture.
      theta: base of the rotary frequencies.
      form: of its layers.
      layout: of pictures and their tokens.
    """

    layers: int
    embed: int
    heads: int
    inner: int
    placeholder: int
    patch: int = 14
    merge: int = 2
    window: int | None = 112
    whole_layers: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    begin: int | None = None
    end: int | None = None
    theta: float = 10000.0
    form: TowerForm = TowerForm()
    layout: PictureLayout = PictureLayout()

    def __post_init__(self) -> None:
        check_sizes(layers=self.layers, embed=self.embed, heads=self.heads, inner=self.inner, patch=self.patch)
        check_sizes(merge=self.merge, window=self.window_tokens)
        if self.embed % self.heads:
            raise ModelError(f"the tower's embed {self.embed} is no multiple of its {self.heads} heads")
        if self.form.rotates and self.embed % (4 * self.heads):
            raise ModelError(
                f"the tower's embed {self.embed} over {self.heads} heads is no multiple of 4: a head rotates one half "
                "by rows and one by columns"
            )
        side = self.layout.side
        if side is not None and side % self.merge:
            raise ModelError(
                f"pictures have {side} patches a side, which is no multiple of the {self.merge} of a token"
            )
        tiles = self.layout.tiles
        if tiles is not None and tiles.states * self.merge != tiles.pixels // self.patch:
            raise ModelError(
                f"tiles of {tiles.pixels} pixels have {tiles.pixels // self.patch} patches a side, which are not "
                f"{tiles.states} tokens of {self.merge}"
            )
        deep = self.form.deep_layers
        if list(deep) != sorted(set(deep) & set(range(self.layers))):
            raise ModelError(f"deep_layers is {list(deep)}; they must be some of the tower's {self.layers}, in order")

    @property
    def window_tokens(self) -> int:
        """Side of a window, in tokens."""
        return NO_WINDOW if self.window is None else self.window // (self.patch * self.merge)

    @property
    def unsampled(self) -> tuple[int, ...]:
        """Ids of tokens that no policy may sample."""
        return tuple(sorted({self.placeholder, *self.banned}))

    @property
    def video(self) -> int:
        """Id of the placeholder of videos; that of pictures where there is none."""
        return next(iter(self.banned), self.placeholder)

    def with_last_layers(self, layers: int, whole: int) -> TowerConfig:
        """The same tower with fewer layers: those in `deep_layers`, and the last ones of each kind.

        Args:
          layers: of the new tower, at least as many as `deep_layers`.
          whole: number of layers that see whole pictures, at least as many as of `deep_layers` do.

        Raises:
          ModelError: the tower has too few layers of a kind.
        """
        deep = self.form.deep_layers
        kept: list[int] = []
        for sees_whole, count in ((False, layers - whole), (True, whole)):
            kind = [i for i in range(self.layers) if (i in self.whole_layers) == sees_whole]
            first = [i for i in kind if i in deep]
            others = [i for i in kind if i not in deep]
            if not len(first) <= count <= len(kind):
                raise ModelError(f"{count} layers are not between {len(first)} and {len(kind)}")
            kept += first + others[len(others) - (count - len(first)) :]
        kept.sort()
        return replace(
            self,
            layers=layers,
            whole_layers=tuple(i for i, old in enumerate(kept) if old in self.whole_layers),
            form=replace(self.form, deep_layers=tuple(i for i, old in enumerate(kept) if old in deep)),
        )


@dataclass(frozen=True, kw_only=True)
class VisionLanguageConfig(Config):
    """Sizes and switches of a decoder with a vision tower.

    Attributes:
      tower: of the tower.
    """

    tower: TowerConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        outside = [number for number in self.tower.unsampled if not 0 <= number < self.vocab]
        if outside:
            raise ModelError(f"the placeholder {outside[0]} is no token: the vocabulary has {self.vocab}")
        if len(self.tower.form.deep_layers) > self.layers:
            raise ModelError(
                f"{len(self.tower.form.deep_layers)} deep_layers of the tower need as many layers of the decoder, "
                f"which has {self.layers}"
            )


def with_tower(config: Config, tower: TowerConfig) -> VisionLanguageConfig:
    """The config of a decoder with a tower."""
    fields: dict[str, Any] = {name: value for name, value in vars(config).items() if name != "tower"}
    return VisionLanguageConfig(**fields, tower=tower)


def tower_in(config: Config) -> TowerConfig:
    """The tower of a config. Raises: ModelError, it has none."""
    if not isinstance(config, VisionLanguageConfig):
        raise ModelError(
            f"a {config.source.family} config.json needs a vision tower: with_vision(model, tower) gives it one"
        )
    return config.tower

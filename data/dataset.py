"""The prepared data of a configuration: which folders hold it, and whether they were prepared for it."""

import functools
import pathlib
from dataclasses import dataclass
from typing import Any

import config
from config import ConfigError
from data.folder import data_folders, prepared_parts, source_names
from data.growing import GrowingText
from data.identity import check_identity
from data.order import make_order
from data.record import manifest_of, validation_range
from data.tokens import open_stream, stream_of


def open_data(cfg: config.Config, split: str) -> list[Any]:
    """The TokenStream of each source, "train" or "heldout" (validation), or its conversations (extras/chat/packing.py:
    Packed). Raises ConfigError if one is not prepared as far as that, or for another configuration."""
    return [open_part(folder, part, split) for folder, part in prepared_parts(cfg)]


def open_part(folder: pathlib.Path, cfg: config.Config, split: str) -> Any:
    """open_data() of one source."""
    manifest = manifest_of(folder)
    check_identity(folder, manifest, cfg)
    if cfg.data.messages_field:
        from extras.chat.packing import open_packed

        return open_packed(folder, split, cfg)
    if split == "heldout" and cfg.data.order == "growing":
        if validation_range(manifest) is None:
            tokens = manifest["tokens"]["train"]
            raise ConfigError(
                f"{folder}: its validation text is not prepared yet, at {tokens:,} tokens; `python "
                "-m data.prepare CONFIG` prepares it"
            )
        return stream_of(folder, manifest, split, cfg.model.vocab_size)
    return open_stream(folder, split, cfg.model.vocab_size)


@dataclass
class Dataset:
    """A configuration's data, opened: prepared, or being prepared."""

    cfg: config.Config
    folders: list[pathlib.Path]  # of each source; without a mixture, [data] is the only one
    train: list[Any]  # of each source a TokenStream, Packed or GrowingStream
    order: Any  # sample number -> data.order.Place
    growing: GrowingText | None  # with data.order = "growing": how far the text is
    names: list[str]  # of a mixture's sources
    tokenizer_files: list[pathlib.Path]
    notes: list[str]  # warnings for the user

    @functools.cached_property
    def validation(self) -> list[Any]:
        """The validation text of each source. Raises ConfigError if it is missing, or not prepared yet."""
        return open_data(self.cfg, "heldout")

    def has_validation(self) -> bool:
        """Whether it can be opened: of growing text, not from the beginning."""
        return self.growing is None or self.growing.has_validation()

    def identities(self) -> list[dict]:
        """What tells the data from another run's before any of it is read, by source."""
        keys = ("identity", "tokenizer") if self.growing else ("identity", "tokens", "sha256")
        manifests = map(manifest_of, self.folders)
        return [{key: manifest.get(key) for key in keys} for manifest in manifests]

    def fingerprint(self, step: int) -> list[dict]:
        """What tells the data from another run's that the steps up to `step` have read, by source."""
        sources = self.identities()
        if self.growing:
            for source, stream in zip(sources, self.growing.streams):
                source["segments"] = self.growing.segments(step)[stream.number]
                source["validation_hash"] = stream.manifest.get("validation_hash")
        return sources

    def require(self, fingerprint: list[dict] | None) -> None:
        """Refuses growing text other than a checkpoint was trained on; what isn't prepared yet is compared when it is.
        Raises ConfigError."""
        if not (self.growing and fingerprint):
            return
        for stream, before in zip(self.growing.streams, fingerprint):
            stream.require(before["segments"], before["validation_hash"])


def open_dataset(cfg: config.Config, train: bool = True) -> Dataset:
    """Opens the training data and, with [eval], the validation data; train=False: only the latter. Raises ConfigError
    if it is not prepared, was prepared for another configuration, or is known to be too small for one batch."""
    folders = data_folders(cfg)
    training: list[Any] = []
    growing: GrowingText | None = None
    order: Any = None
    if cfg.data.order == "growing":
        for folder, part in prepared_parts(cfg):
            check_identity(folder, manifest_of(folder), part)
        growing = GrowingText(cfg, folders)
        training = [*growing.streams]
        order = growing.order
    elif train:
        training = open_data(cfg, "train")
        order = make_order(cfg, training)
    manifests = list(map(manifest_of, folders))
    tokenizer = sorted([*folders[0].glob("tokenizer*"), *folders[0].glob("chat_template.jinja")])
    notes = []
    if cfg.data.messages_field:
        notes += [packed.summary() for packed in training]
    entries = manifests[0]["vocab_size"]
    if entries < cfg.model.vocab_size:
        notes.append(
            f"the tokenizer of {folders[0]} has {entries:,} entries, the model "
            f"{cfg.model.vocab_size:,} rows"
        )
    if cfg.model.init_from:
        from extras.huggingface.tokenizer import note_on_tokenizer

        notes += note_on_tokenizer(cfg.model.init_from, folders[0], tokenizer)
    names = source_names(cfg)
    dataset = Dataset(cfg, folders, training, order, growing, names, tokenizer, notes)
    if (cfg.eval or not train) and (not train or dataset.has_validation()):
        empty = [str(stream.path) for stream in dataset.validation if stream.length < 2]
        notes += [f"{path}: holds no validation text: it has no validation loss" for path in empty]
    return dataset

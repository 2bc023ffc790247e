"""Settings: flags over environment (`LATIMER_…`) over a TOML file, one model for all three."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ..backends.llama_cpp.options import CacheType
from ..backends.turns import QUEUE
from .instruct import FORMATS

BackendName = Literal["auto", "llama-cpp", "llama-server", "koboldcpp"]
Words = Annotated[list[str], NoDecode]


class Settings(BaseSettings):
    """Everything that `latimer serve` and `latimer check` can be told.

    Lists are written with commas in the environment and as arrays in the file.
    """

    model_config = SettingsConfigDict(env_prefix="LATIMER_", extra="forbid")

    model: str | None = Field(None, description="A GGUF file or an engine's URL.")
    backend: BackendName = Field("auto", description="Which engine it is; found out by default.")
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    model_name: Words = Field(default_factory=list, description="How clients call the model.")
    any_model: bool = False
    api_key: Annotated[list[SecretStr], NoDecode] = Field(default_factory=list)
    api_key_file: Path | None = Field(None, description="A file with one key a line.")
    cors_origin: Words = Field(default_factory=lambda: ["*"])
    max_body: Annotated[int, Field(ge=1)] = 32 * 1024 * 1024
    strict: bool = False
    parse_content: bool = False
    fetch_images: bool = False
    chat_format: str | None = Field(None, description="An instruct format, by its name.")
    share_prefixes: bool = False
    drain: Annotated[int, Field(ge=0)] = Field(
        30, description="Seconds that running requests get to end after SIGTERM."
    )
    engine_key: SecretStr | None = Field(None, description="The engine's own API key.")
    engine_timeout: Annotated[float, Field(gt=0)] = Field(
        60.0, description="Seconds of silence after which llama-server's answer is lost."
    )
    queue: Annotated[int, Field(ge=0)] = Field(QUEUE, description="Requests that may wait.")
    context: Annotated[int, Field(ge=1)] | None = None
    parallel: Annotated[int, Field(ge=1, le=256)] = 16
    threads: Annotated[int, Field(ge=1)] | None = None
    batch: Annotated[int, Field(ge=1)] = 512
    gpu_layers: int = -1
    cache_type: CacheType | None = None
    cache_memory: Annotated[int, Field(ge=0)] | None = Field(
        None, description="MiB for what has finished, so that prompts can go on from it."
    )
    flash_attention: bool | None = None
    mmap: bool | None = None
    mlock: bool = False
    mmproj: Path | None = Field(None, description="A projector, for images and audio.")
    lora: Words = Field(default_factory=list, description="LoRA adapters, FILE or FILE=SCALE.")
    exact: bool = False
    logit_bias_vocabulary: str | None = Field(
        None, description="Whose token ids clients send: cl100k_base, o200k_base …"
    )

    @field_validator("model_name", "cors_origin", "api_key", "lora", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [word.strip() for word in value.split(",") if word.strip()]
        return value

    @field_validator("chat_format")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in FORMATS:
            raise ValueError(f"there is no {value!r}; there are {', '.join(FORMATS)}")
        return value

    @field_validator("flash_attention", mode="before")
    @classmethod
    def _where_possible(cls, value: Any) -> Any:
        return None if value == "auto" else value

    @field_validator("gpu_layers", mode="before")
    @classmethod
    def _all(cls, value: Any) -> Any:
        return -1 if value == "all" else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags first, then the environment, then the file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @classmethod
    def load(cls, file: Path | None, **flags: Any) -> Settings:
        """Settings of a command: the flags that were given, the environment, the file.

        Raises:
            ValueError: a value is not allowed, or the file has a key that no setting has.
            OSError: the file cannot be read.
        """
        given = {name: value for name, value in flags.items() if value is not None and value != ()}
        if file is None:
            return cls(**given)
        file.open().close()

        class FromFile(cls):  # type: ignore[valid-type, misc]
            model_config = SettingsConfigDict(**{**cls.model_config, "toml_file": file})

        return FromFile(**given)

    @property
    def cache_bytes(self) -> int | None:
        """`cache_memory` in bytes."""
        return None if self.cache_memory is None else self.cache_memory << 20

    def adapters(self) -> list[tuple[str, float]]:
        """Each LoRA's file, and how much it counts for.

        Raises:
            ValueError: what follows the equals sign is no number.
        """
        found = []
        for one in self.lora:
            path, _, scale = one.rpartition("=") if "=" in one else (one, "", "1")
            try:
                found.append((path, float(scale)))
            except ValueError:
                raise ValueError(f"lora: {one!r} must end with a number after '='") from None
        return found

    def keys(self) -> list[str]:
        """Every API key, from wherever it was given."""
        keys = [key.get_secret_value() for key in self.api_key]
        if self.api_key_file is not None:
            keys += self.api_key_file.read_text().split()
        return keys

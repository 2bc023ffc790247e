"""The command `latimer completion`, and the completion of models' names."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, FishComplete, ShellComplete, ZshComplete

# As click's own for bash 4.4, but bash splits words at colons too, which names of models have.
_BASH = """\
%(complete_func)s() {
    local line="${COMP_LINE:0:COMP_POINT}" current prefix response completion type value
    local -a words
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    current="${words[-1]##*=}"
    prefix="${current%%"${current##*:}"}"
    [[ $COMP_WORDBREAKS == *:* ]] || prefix=""
    response=$(env COMP_WORDS="$line" COMP_CWORD=$((${#words[@]} - 1)) \
%(complete_var)s=bash_complete "$1")
    while IFS=',' read -r type value; do
        if [[ $type == dir ]]; then
            compopt -o dirnames
        elif [[ $type == file ]]; then
            compopt -o default
        elif [[ $type == plain ]]; then
            COMPREPLY+=("${value#"$prefix"}")
        fi
    done <<< "$response"
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class _Bash(ShellComplete):
    name = "bash"
    source_template = _BASH


_SHELLS: dict[str, type[ShellComplete]] = {
    shell.name: shell for shell in (_Bash, ZshComplete, FishComplete)
}


@click.command()
@click.argument("shell", type=click.Choice([*_SHELLS]))
def completion(shell: str) -> None:
    """Print the script that completes commands, options and names of models in a shell.

    It needs bash 4.4 or newer, zsh or fish.

    \b
    Examples:
      eval "$(latimer completion bash)"                  in ~/.bashrc
      eval "$(latimer completion zsh)"                   in ~/.zshrc, after compinit
      latimer completion fish > ~/.config/fish/completions/latimer.fish
    """
    command = click.get_current_context().find_root().command
    click.echo(_SHELLS[shell](command, {}, "latimer", "_LATIMER_COMPLETE").source())


def models_or_files(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the names of models in the hub's cache that begin so, or else ask for files."""
    names = models_only(context, parameter, incomplete) if incomplete else []
    return names or [CompletionItem(incomplete, type="file")]


def models_only(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the names of models in the hub's cache that begin so."""
    from ..hub.cache import names_of_models

    names = map(str, names_of_models())
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]

# Completion of linnaeus in bash, written by `linnaeus --install-completion bash`.

_linnaeus() {
    local IFS=$'\n'
    COMPREPLY=($("$1" --complete bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null))
    if [[ ${COMPREPLY[0]} == :files ]]; then
        COMPREPLY=()
        compopt -o default 2>/dev/null
    elif [[ ${COMPREPLY[0]} == *[=.] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _linnaeus linnaeus

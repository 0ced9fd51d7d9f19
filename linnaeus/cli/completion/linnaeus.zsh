#compdef linnaeus
# Completion of linnaeus in zsh, written by `linnaeus --install-completion zsh`.

_linnaeus() {
    local line
    local -a lines names texts open_names open_texts
    lines=("${(@f)$("${words[1]}" --complete zsh "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ ${lines[1]} == :files ]]; then
        compset -P '*='
        _files
        return
    fi
    for line in $lines; do
        if [[ ${line%%$'\t'*} == *[=.] ]]; then
            open_names+=("${line%%$'\t'*}")
            open_texts+=("${line/$'\t'/  }")
        else
            names+=("${line%%$'\t'*}")
            texts+=("${line/$'\t'/  }")
        fi
    done
    (( $#names )) && compadd -l -d texts -- $names
    (( $#open_names )) && compadd -S '' -l -d open_texts -- $open_names
}

if [[ ${funcstack[1]} == _linnaeus ]]; then
    _linnaeus "$@"
else
    compdef _linnaeus linnaeus
fi

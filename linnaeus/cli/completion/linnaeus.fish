# Completion of linnaeus in fish, written by `linnaeus --install-completion fish`.

function __linnaeus_complete
    set -l before (commandline -opc)
    set -l program $before[1]
    set -e before[1]
    set -l word (commandline -ct)
    set -l lines ($program --complete fish $before "$word" 2>/dev/null)
    if test "$lines[1]" = :files
        set -l prefix (string match -r -- '^[^=]*=' "$word")
        __fish_complete_path (string replace -r -- '^[^=]*=' '' "$word") | string replace -r -- '^' "$prefix"
    else
        printf '%s\n' $lines
    end
end

complete -c linnaeus -f -a '(__linnaeus_complete)'

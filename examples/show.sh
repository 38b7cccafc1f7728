# shellcheck shell=bash
# Function `show` for scripts of this folder: prints of its input the lines that matter to a reader, or all
# with SHOW=all. It goes on after Ctrl-C: what ends then still prints.
#
#   COMMAND 2>&1 | tee -i all.log | show ARGS_OF_COMMAND
show() {
    local filter=(python "$(dirname "${BASH_SOURCE[0]}")/job_lines.py")
    case "${SHOW:-} $* " in "all "* | *" -h "* | *" --help "*) filter=(cat) ;; esac
    (trap '' INT && exec "${filter[@]}")
}

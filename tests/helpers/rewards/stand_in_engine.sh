#!/bin/sh
# Stands in for the command line of Docker: takes the same commands, notes them, and runs programs without a container.
here=$(dirname "$0")
for each in "$@"; do echo "$each"; done >> "$here/$1.log"
case "$1" in
image) test -e "$here/image.tar" ;;
import) cat > "$here/image.tar" ;;
kill) kill -s KILL -- "-$(cat "$here/$2")" ;;
run)
    if test -e "$here/broken"; then
        echo "docker: Error response from daemon: out of everything" >&2
        exit 125
    fi
    while test "$1" != penstock-sandbox:1; do
        test "$1" = --name && name=$2
        test "$1" = --workdir && cd "$2"
        shift
    done
    shift
    exec 3<&0
    setsid "$@" <&3 2>/dev/null &
    child=$!
    echo $child > "$here/$name"
    trap 'kill -s TERM -- "-$child"' TERM
    wait $child
    status=$?
    # The signal that is passed on ends the first wait.
    kill -0 $child 2>/dev/null && wait $child
    exit $status
    ;;
esac

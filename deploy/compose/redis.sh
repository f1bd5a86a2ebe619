#!/bin/sh
# Redis of the compose file: `redis.sh serve` runs it, `redis.sh ping` is its health check. The password comes from the
# environment or a file and is on no command line.
set -eu
password=${PENSTOCK_REDIS_PASSWORD:-}
if [ -n "${PENSTOCK_REDIS_PASSWORD_FILE:-}" ]; then password=$(cat "$PENSTOCK_REDIS_PASSWORD_FILE"); fi

case "$1" in
ping)
  if [ -n "$password" ]; then export REDISCLI_AUTH="$password"; fi
  [ "$(redis-cli ping)" = PONG ]
  ;;
serve)
  settings=$(mktemp /dev/shm/redis.XXXXXX)
  cat >"$settings" <<END
bind 0.0.0.0
protected-mode no
dir /data
appendonly yes
appendfsync everysec
maxmemory 2gb
maxmemory-policy noeviction
END
  if [ -n "$password" ]; then
    printf 'requirepass "%s"\n' "$(printf %s "$password" | sed 's/[\\"]/\\&/g')" >>"$settings"
  fi
  exec redis-server "$settings"
  ;;
*)
  echo "usage: redis.sh serve|ping" >&2
  exit 2
  ;;
esac

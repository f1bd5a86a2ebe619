-- Answer the roll of the brokers, see roll.py.
-- KEYS: roll, shards of runs.  ARGV: name, what it says of itself, its process, how long a broker may be silent
--   (microseconds), 1 if it leaves, how long the roll is kept (seconds).
-- Returns {epoch, the process that answered last by this name, shards of runs as {run, number, ...}, name, what it says
--   of itself, ...}.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local me, said, process = ARGV[1], ARGV[2], ARGV[3]
local stored = redis.call('HGETALL', KEYS[1])
local epoch, is_changed, last = 0, false, ''
local found = {}
for at = 1, #stored, 2 do
  local name = string.sub(stored[at], 3)
  if stored[at] == 'epoch' then
    epoch = tonumber(stored[at + 1])
  else
    local entry = cjson.decode(stored[at + 1])
    local is_mine = name == me
    if is_mine then
      last = entry[2]
    end
    if is_mine and ARGV[5] == '1' and entry[2] == process or not is_mine and now - tonumber(entry[3]) > tonumber(ARGV[4]) then
      redis.call('HDEL', KEYS[1], stored[at])
      is_changed = true
    else
      found[name] = entry[1]
    end
  end
end
if ARGV[5] ~= '1' then
  is_changed = is_changed or found[me] ~= said
  found[me] = said
  redis.call('HSET', KEYS[1], 'b:' .. me, cjson.encode({said, process, string.format('%d', now)}))
end
if is_changed then
  epoch = math.max(epoch + 1, math.floor(now / 1000))
  redis.call('HSET', KEYS[1], 'epoch', string.format('%d', epoch))
end
redis.call('EXPIRE', KEYS[1], ARGV[6])
local reply = {string.format('%d', epoch), last, redis.call('HGETALL', KEYS[2])}
for name, text in pairs(found) do
  reply[#reply + 1] = name
  reply[#reply + 1] = text
end
return reply

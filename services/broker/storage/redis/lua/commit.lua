-- One change of a run, whole or not at all.
-- KEYS: run, marks, changed, groups, prompts, retired, books, retired earlier, then payloads that must last, the
--   chunk lists to append to, and keys to delete.
-- ARGV: expected revision and name ("0" and "" when the run must not exist), name of this commit, run record,
--   number of marks to keep, counts of: records, prompts, retired ids, chunks, chunk lists to append to, counters;
--   version into which the counters of older ones are folded (empty: none); counts of: fresh ids, payloads;
--   number of retired ids to keep at least;
--   then fresh ids ..., name and record (empty: remove) ..., group id and prompt (empty: remove) ...,
--   retired ids ..., position of the chunk list and chunk ... (chunks only, if there are as many lists), counter and what
--   to add to it ...
-- Returns the new revision; false when the run is not at the expected mark, or payload is gone that was written ahead;
--   a list of positions when fresh ids are retired. Running it again with the same name changes nothing and returns the
--   same.
local known = redis.call('ZSCORE', KEYS[2], ARGV[3])
if known then
  return tonumber(known)
end
local current = redis.call('HMGET', KEYS[1], 'revision', 'name')
if (current[1] or '0') ~= ARGV[1] or (current[2] or '') ~= ARGV[2] then
  return false
end
local revision = tonumber(ARGV[1]) + 1
local oldest = revision - tonumber(ARGV[5])
local num_groups, num_prompts, num_retired = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local num_chunks, num_lists = tonumber(ARGV[9]), tonumber(ARGV[10])
local num_counters, fold_version = tonumber(ARGV[11]), tonumber(ARGV[12])
local num_fresh, num_payloads = tonumber(ARGV[13]), tonumber(ARGV[14])
local first_payload, first_list = 9, 9 + num_payloads
local at = 16

local taken = {}
for first = 0, num_fresh - 1, 1000 do
  local last = math.min(first + 1000, num_fresh)
  local before = redis.call('SMISMEMBER', KEYS[8], unpack(ARGV, at + first, at + last - 1))
  for i, flag in ipairs(redis.call('SMISMEMBER', KEYS[6], unpack(ARGV, at + first, at + last - 1))) do
    if flag == 1 or before[i] == 1 then
      taken[#taken + 1] = first + i
    end
  end
end
if #taken > 0 then
  return taken
end
at = at + num_fresh
for i = first_payload, first_list - 1 do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    return false
  end
end

for i = first_payload, first_list - 1 do
  redis.call('PERSIST', KEYS[i])
end
redis.call('HSET', KEYS[1], 'revision', string.format('%d', revision), 'name', ARGV[3], 'record', ARGV[4])
redis.call('ZADD', KEYS[2], revision, ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', oldest)
for _ = 1, num_groups do
  redis.call('ZADD', KEYS[3], revision, ARGV[at])
  if ARGV[at + 1] == '' then
    redis.call('HDEL', KEYS[4], ARGV[at])
  else
    redis.call('HSET', KEYS[4], ARGV[at], ARGV[at + 1])
  end
  at = at + 2
end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', oldest)
for _ = 1, num_prompts do
  if ARGV[at + 1] == '' then
    redis.call('HDEL', KEYS[5], ARGV[at])
  else
    redis.call('HSET', KEYS[5], ARGV[at], ARGV[at + 1])
  end
  at = at + 2
end
for _ = 1, num_retired do
  redis.call('SADD', KEYS[6], ARGV[at])
  at = at + 1
end
if num_retired > 0 and redis.call('SCARD', KEYS[6]) > tonumber(ARGV[15]) then
  redis.call('UNLINK', KEYS[8])
  redis.call('RENAME', KEYS[6], KEYS[8])
end
-- Deletions first: a sample restarted in this change keeps what the change stores for it.
for i = first_list + num_lists, #KEYS do
  redis.call('UNLINK', KEYS[i])
end
if num_chunks == num_lists then
  for i = 0, num_chunks - 1 do
    redis.call('RPUSH', KEYS[first_list + i], ARGV[at + i])
  end
  at = at + num_chunks
else
  for _ = 1, num_chunks do
    redis.call('RPUSH', KEYS[first_list - 1 + tonumber(ARGV[at])], ARGV[at + 1])
    at = at + 2
  end
end
for _ = 1, num_counters do
  redis.call('HINCRBY', KEYS[7], ARGV[at], ARGV[at + 1])
  at = at + 2
end
if fold_version then
  local counters = redis.call('HGETALL', KEYS[7])
  for i = 1, #counters, 2 do
    local version, rest = string.match(counters[i], '^(%d+)(|.*)$')
    if tonumber(version) < fold_version then
      redis.call('HINCRBY', KEYS[7], ARGV[12] .. rest, counters[i + 1])
      redis.call('HDEL', KEYS[7], counters[i])
    end
  end
end
return revision

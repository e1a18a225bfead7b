-- What the autoscaler's last tick came to, as it keeps it. KEYS as
return {redis.call('HGET', KEYS[1], 'status') or ''}

{{/* Volumes of a service's pods. */}}
{{- define "draftwire.volumes" -}}
{{- $values := index .root.Values .name -}}
{{- $isVerifier := eq .name "verifier" -}}
{{- $hasDrafter := or (eq .name "drafter") .root.Values.drafter.colocated -}}
{{- $models := .root.Values.models -}}
{{- $cache := .root.Values.compileCache -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ $values.tmpSizeLimit }}
- name: compile-cache
  {{- if $cache.hostPath }}
  hostPath:
    path: {{ $cache.hostPath }}
    type: Directory
  {{- else if $cache.claim }}
  persistentVolumeClaim:
    claimName: {{ $cache.claim }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $cache.sizeLimit }}
  {{- end }}
- name: models
  {{- if $models.hostPath }}
  hostPath:
    path: {{ $models.hostPath }}
    type: Directory
  {{- else if $models.claim }}
  persistentVolumeClaim:
    claimName: {{ $models.claim }}
    readOnly: {{ and $models.readOnly (not $models.download.enabled) }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- with $values.shmSizeLimit }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ . }}
{{- end }}
{{- with .root.Values.rendezvous.hostPath }}
- name: rendezvous
  hostPath:
    path: {{ . }}
    type: Directory
{{- end }}
{{- $secrets := dict }}
{{- if .root.Values.tls.enabled }}
{{- if $isVerifier }}
{{- $_ := set $secrets "verifier-tls" .root.Values.tls.verifierSecret }}
{{- $_ := set $secrets "drafter-client-tls" .root.Values.tls.drafterClientSecret }}
{{- end }}
{{- if $hasDrafter }}
{{- $_ := set $secrets "drafter-tls" .root.Values.tls.drafterSecret }}
{{- end }}
{{- end }}
{{- if and $isVerifier .root.Values.tokens.secret }}
{{- $_ := set $secrets "tokens" .root.Values.tokens.secret }}
{{- end }}
{{- range $name, $secret := $secrets }}
- name: {{ $name }}
  secret:
    secretName: {{ $secret }}
    defaultMode: 0440
{{- end }}
{{- $extra := $values.extraVolumes }}
{{- if and $isVerifier .root.Values.drafter.colocated }}{{ $extra = concat $extra .root.Values.drafter.extraVolumes }}{{ end }}
{{- with $extra }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "dlrover.secret" -}}
{{ .Values.secret.name | default (printf "%s-etcd" .Release.Name) }}
{{- end }}

{{- define "dlrover.endpoint" -}}
{{- if .Values.etcd.enabled -}}
{{ .Release.Name }}-etcd:2379
{{- else -}}
{{ required "endpoint: HOST:PORT of an etcd, with etcd.enabled: false" .Values.endpoint }}
{{- end -}}
{{- end }}

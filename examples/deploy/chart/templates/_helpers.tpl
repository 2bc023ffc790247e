{{- define "latimer.selector" -}}
app.kubernetes.io/name: latimer
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "latimer.metadata" -}}
name: {{ .Release.Name }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "latimer.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- define "latimer.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
{{- define "latimer.user" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}
{{- /* The variables, mounts and volumes of every pod that runs Latimer. */ -}}
{{- define "latimer.environment" -}}
- {name: LATIMER_METRICS_OPEN, value: {{ .Values.metrics.open | quote }}}
{{- if ne .Values.store "secret" }}
- {name: LATIMER_STORE, value: {{ .Values.store | quote }}}
{{- else if not .Values.secretEnv }}
{{- fail "store: secret needs secretEnv, the name of a Secret with LATIMER_STORE." }}
{{- end }}
{{- if .Values.keys.secret }}
- {name: LATIMER_API_KEY_FILE, value: /run/secrets/latimer/keys}
{{- else }}
# Without a key, only known host names are served; those of a cluster are not known.
- {name: LATIMER_ALLOWED_HOST, value: "*"}
{{- end }}
{{- range $name, $value := .Values.settings }}
- {name: LATIMER_{{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- define "latimer.mounts" -}}
{{- if .Values.config }}
- {name: config, mountPath: /etc/latimer, readOnly: true}
{{- end }}
{{- if .Values.keys.secret }}
- {name: keys, mountPath: /run/secrets/latimer, readOnly: true}
{{- end }}
{{- end }}
{{- define "latimer.volumes" -}}
{{- if .Values.config }}
- name: config
  configMap: {name: {{ .Release.Name }}}
{{- end }}
{{- with .Values.keys }}
{{- if .secret }}
- name: keys
  secret:
    secretName: {{ .secret | quote }}
    items: [{key: {{ .file | quote }}, path: keys}]
{{- end }}
{{- end }}
{{- end }}
{{- define "latimer.placement" -}}
{{- range $name := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $.Values $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

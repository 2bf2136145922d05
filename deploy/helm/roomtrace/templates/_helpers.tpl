{{- define "roomtrace.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "roomtrace.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "roomtrace.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "roomtrace.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "roomtrace.selector" -}}
app.kubernetes.io/name: {{ include "roomtrace.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "roomtrace.labels" -}}
{{ include "roomtrace.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "roomtrace.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "roomtrace.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "roomtrace.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Nothing. What could not work is said in words: settings that are none, and an address that no probe reaches. */}}
{{- define "roomtrace.check" -}}
{{- if not (kindIs "map" .Values.config) -}}
{{- fail "config has nothing in it: leave it out, or write config: {} for the agent's defaults (keys as in agent/roomtrace.yaml)" -}}
{{- end -}}
{{- $listen := dig "http" "listen" "127.0.0.1:9713" .Values.config -}}
{{- if and (dig "http" "enabled" true .Values.config) (or (hasPrefix "127." $listen) (hasPrefix "[::1]" $listen)) -}}
{{- fail (printf "config.http.listen is %q: the kubelet's probes and Prometheus come to the pod's address, so no pod would be ready. Write \"0.0.0.0:9713\" (\"[::]:9713\" with IPv6 alone), or config.http.enabled: false for neither probes nor metrics" $listen) -}}
{{- end -}}
{{- end -}}

{{/* The agent's file: config, with what follows from other values where config does not say it itself. */}}
{{- define "roomtrace.config" -}}
{{- include "roomtrace.check" . -}}
{{- $implied := dict -}}
{{- if .Values.gpu.driverPath -}}
{{- $_ := set $implied "gpu" (dict "lib_path" "/run/roomtrace/driver/libnvidia-ml.so.1") -}}
{{- end -}}
{{- if .Values.collector.enabled -}}
{{- $_ := set $implied "export" (dict "otlp" (dict "endpoint" "http://127.0.0.1:4317")) -}}
{{- end -}}
{{- if not .Values.stateDirectory -}}
{{- $_ := set $implied "state" (dict "file" nil) -}}
{{- end -}}
{{- toYaml (mergeOverwrite $implied (deepCopy .Values.config)) -}}
{{- end -}}

{{- define "roomtrace.port" -}}
{{- include "roomtrace.check" . -}}
{{- regexFind "[0-9]+$" (dig "http" "listen" "127.0.0.1:9713" .Values.config) -}}
{{- end -}}

{{/* Whether the agent serves HTTP at all: "true" or nothing. */}}
{{- define "roomtrace.serves" -}}
{{- include "roomtrace.check" . -}}
{{- if dig "http" "enabled" true .Values.config }}true{{ end -}}
{{- end -}}

{{/* Whether the probes on Mooncake's transfer engine are on: "true" or nothing. They need capabilities of their own. */}}
{{- define "roomtrace.probes" -}}
{{- include "roomtrace.check" . -}}
{{- if dig "probes" "mooncake" false .Values.config }}true{{ end -}}
{{- end -}}
